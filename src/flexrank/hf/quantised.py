"""Reads the quantised weights of a size that transformers saved; imported only for such a size."""

from types import SimpleNamespace
from typing import Any

from transformers.integrations.torchao import TorchAoDeserialize

from flexrank.nn.quantised import notes_on


class Deserialize(TorchAoDeserialize):
    """Makes one quantised weight from its parts, under the name that it has in this model, with torchao's note on it.

    A model without a head may read the size of one with a head, and the other way round, as unquantised ones may.
    """

    def convert(
        self, input_dict: Any, *args: Any, model: Any = None, full_layer_name: str = "", **rest: Any
    ) -> dict[str, Any]:
        """The weight by its name."""
        notes, prefix = self.hf_quantizer.metadata, f"{model.base_model_prefix}."
        names = (full_layer_name, full_layer_name.removeprefix(prefix), prefix + full_layer_name)
        note = next(notes[name] for name in names if name in notes)
        one = TorchAoDeserialize(SimpleNamespace(metadata=notes_on(full_layer_name, note)))
        return one.convert(input_dict, *args, model=model, full_layer_name=full_layer_name, **rest)
