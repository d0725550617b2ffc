"""The files beside a model's weights: tokenizer, image processor, and those of a sentence-transformers model."""

import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from flexrank.errors import FlexrankError, first_line, short_repr
from flexrank.files import digest_file, verify_files, write_json

#: sentence-transformers' list of the modules that a text passes through.
MODULES = "modules.json"
#: The files that show that a directory has a tokenizer; and all of a tokenizer's files, with chats and special tokens.
TOKENIZER_FILES = (
    *("tokenizer*.json", "vocab*.json", "vocab.txt", "dict.txt", "bpe.codes", "prophetnet.tokenizer"),
    *("tokenizer.model", "spiece.model", "spm*.model", "sentencepiece*.model", "bpe.model", "source.spm"),
)
TOKENIZER = (
    *TOKENIZER_FILES,
    *("merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*"),
    *("target.spm", "target_vocab.json", "normalizer.json", "entity_vocab.json", "emoji.json", "byte_maps.json"),
    *("word_shape.json", "word_pronunciation.json"),
)
#: What is copied from where a model was loaded: processors, the list of modules, and the modules' directories.
COMPANION_GLOBS = (
    *("*processor_config.json", MODULES, "sentence_*_config.json", "config_sentence_transformers.json"),
    "[0-9]_*/*",
)
#: The suffixes of pickles, which are neither copied nor downloaded from the hub.
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
#: The model card, which says whose a model is and under which licence.
CARD = "README.md"
#: A repository's name; with those that have no owner, as the oldest models; and a directory in the hub's cache, with
#: groups for cache, repository and commit.
REPOSITORY = re.compile(r"[\w.-]*\w[\w.-]*/[\w.-]+")
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
CACHED = re.compile(r"(.*)/models--([^/]+)/snapshots/([0-9a-f]{40})(?:/.*)?")
log = logging.getLogger("flexrank")


def save_companions(model: Any, directory: Path, tokenizer: Any = None) -> None:
    """Writes the files that a transformers model has beside its weights.

    The image processor, sentence-transformers' modules, and the tokenizer with its chat template are copied from where
    the model was loaded. If a `tokenizer` is given, it is saved in place of the copied one.
    """
    source = source_of(model)
    if source is not None:
        _copy(source, directory, COMPANION_GLOBS if tokenizer else (*COMPANION_GLOBS, *TOKENIZER))
    save_tokenizer(tokenizer, directory)


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Writes the tokenizer, if there is one; raises FlexrankError if it is none."""
    if tokenizer is None:
        return
    if not hasattr(tokenizer, "save_pretrained"):
        raise FlexrankError(f"tokenizer is {short_repr(tokenizer)}; it is what AutoTokenizer.from_pretrained returns")
    tokenizer.save_pretrained(directory)


class MeanPooled:
    """The tokenizer of a model that embeds texts by the normalised mean over real tokens, as `metrics.embed` does.

    Saving it makes the directory a sentence-transformers model that cuts texts at `max_tokens`, unless it is one
    already.
    """

    def __init__(self, tokenizer: Any, max_tokens: int):
        self._tokenizer, self._max_tokens = tokenizer, max_tokens

    def save_pretrained(self, directory: str | Path) -> None:
        """Writes the tokenizer, and a list of three modules: the model in the directory, pooling and normalisation."""
        import transformers

        self._tokenizer.save_pretrained(directory)
        directory = Path(directory)
        if (directory / MODULES).is_file():
            return
        width = transformers.AutoConfig.from_pretrained(directory).get_text_config().hidden_size
        pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
        (directory / "1_Pooling").mkdir(exist_ok=True)
        write_json(directory / "1_Pooling" / "config.json", pooling)
        write_json(directory / "sentence_bert_config.json", {"max_seq_length": self._max_tokens})
        paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
        write_json(
            directory / MODULES,
            [
                {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
                for place, (kind, path) in enumerate(paths.items())
            ],
        )


def verify_artefact(directory: Path, digests: Mapping[str, str], reason: str = "truncated or edited") -> None:
    """As `files.verify_files`, but only logs changes to tokenizer and chat template, which a user may edit."""
    editable = {name for name in digests for pattern in TOKENIZER if fnmatch(name, pattern)}
    verify_files(directory, {name: digest for name, digest in digests.items() if name not in editable}, reason)
    for name in sorted(editable):
        if not (directory / name).is_file() or digest_file(directory / name) != digests[name]:
            log.info("%s: edited since it was written", directory / name)


def _copy(source: Path, directory: Path, patterns: Sequence[str]) -> None:
    for path in (path for pattern in patterns for path in source.glob(pattern)):
        if path.is_file() and path.suffix not in PICKLES:
            target = directory / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)


def local_directory(place: str | Path) -> Path:
    """The directory itself; for a hub repository `owner/name`, its directory in the cache, downloaded if necessary."""
    is_here = Path(place).exists() or not REPOSITORY.fullmatch(str(place))
    return Path(place) if is_here else _snapshot(str(place))


def complete_snapshot(directory: Path) -> Path:
    """The directory itself; if it is in the hub's cache, the files of its commit that are not there yet are fetched."""
    cached = CACHED.fullmatch(directory.as_posix())
    if cached:
        cache, name, commit = cached.groups()
        _snapshot(name.replace("--", "/"), revision=commit, cache_dir=cache)
    return directory


def _snapshot(name: str, **options: Any) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, ignore_patterns=[f"*{ending}" for ending in PICKLES], **options))
    except (OSError, ValueError) as error:
        why = f"no such directory, and not fetched from the hub: {first_line(error).rstrip('.')}"
        mend = "for another revision or cache, give the directory that huggingface_hub.snapshot_download returns"
        raise FlexrankError(f"{name}: {why}; {mend}") from error


def source_of(model: Any) -> Path | None:
    """The directory that a model was loaded from, for a hub model in the cache; None if there is none."""
    name = model.name_or_path
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    if not HUB_NAME.fullmatch(name):
        log.warning("files beside the model in %s are not copied: the directory no longer exists", name)
        return None
    try:
        revision = getattr(model.config, "_commit_hash", None)
        return _snapshot(name, revision=revision, allow_patterns=[*COMPANION_GLOBS, *TOKENIZER, CARD])
    except FlexrankError as error:  # no network, or no such place any more
        log.warning("files beside the model in %s are not copied: %s", name, error)
        return None
