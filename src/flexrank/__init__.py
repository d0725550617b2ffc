"""flexrank: one pretrained network becomes one elastic network, and every size is cut from its one set of weights.

The names in `__init__.pyi` are the public interface; anything else is private, or a module one names on purpose. Each
is imported when it is first used, so that `import flexrank` costs next to nothing. It also teaches transformers,
without importing it, to load what `deploy` made.
"""

import lazy_loader

from flexrank import hf as hf

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
