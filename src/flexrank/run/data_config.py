"""The part of a run's configuration that says what it reads."""

import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

Count = Annotated[int, Field(ge=1)]
#: `~` is the user's directory.
LocalPath = Annotated[str, Field(min_length=1), pydantic.AfterValidator(os.path.expanduser)]

#: Sources that are always streams; and keys of `data` that belong to certain sources.
STREAMS = ("jsonl", "parquet", "hub")
KEYS_OF_SOURCES = {
    "held_out": ("text",), "separator": ("text",), "streaming": ("text",), "column": STREAMS,
    "subset": ("hub",), "split": ("hub",), "revision": ("hub",),
}  # fmt: skip


class Section(pydantic.BaseModel):
    """A part of the configuration."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _empty_is_default(cls, value: object) -> object:
        return {} if value is None else value  # YAML reads a section without keys as null

    @pydantic.field_validator("*", mode="wrap")
    @classmethod
    def _as_written(cls, value: Any, validate: pydantic.ValidatorFunctionWrapHandler) -> Any:
        if value == "None":
            raise ValueError("YAML reads None as text; write null")
        validated = validate(value)
        given = value if isinstance(value, list | tuple) else [value]
        if not isinstance(validated, bool) and any(isinstance(one, bool) for one in given):  # to pydantic, 0 and 1
            raise ValueError("true and false are not numbers")
        return validated


class DataConfig(Section):
    """What a run reads, and the most samples that each stage takes: texts, blocks of tokens, or images."""

    # `stdlib-docs` is the documentation of Python's own library, `text` a UTF-8 file or a folder of them, `images` an
    # .npz file. The others are streams, never in memory as a whole: `jsonl` and `parquet` files, `hub` a data set.
    source: Literal["stdlib-docs", "text", "images", "jsonl", "parquet", "hub"] = "stdlib-docs"
    # Relative to the current directory; for streamed files it may be a glob, for `hub` it is the name of a data set.
    path: LocalPath | None = None
    streaming: bool = False  # reads `text` as a stream too: of lines or, with separator "\n\n", of paragraphs
    column: str | None = None  # of texts or chats, in jsonl, parquet and hub; None is `text`, otherwise `messages`
    subset: str | None = None  # of a data set of `hub`, as are the next two keys
    split: str | None = None  # None is `train`
    revision: str | None = None  # None is the newest
    shuffle_buffer: Annotated[int, Field(ge=0)] = 1000  # documents of a stream that training mixes; 0 keeps their order
    # Another file or folder of `text` to evaluate on, also inside `path`; None is the last quarter of `path`.
    held_out: LocalPath | None = None
    # What separates the texts of a `text` file; None is a line end for embedding and streams, and for language nothing:
    # each file is one running text.
    separator: Annotated[str, Field(min_length=1)] | None = None
    calibration: Count = 1024  # samples that the decomposition is calibrated on
    probe: Count = 192  # samples that layers are probed on
    training: Count | None = None  # samples that sizes are trained on; None is all of that part, or of a stream
    evaluation: Count = 512  # samples for the table's qualities; of `stdlib-docs` (embedding), pairs of docstring parts
    # Which half of the held-out samples, by hash: settings are chosen on one, tables show the other. None takes all.
    half: Literal["tuning", "reporting"] | None = None
    max_tokens: Annotated[int, Field(ge=2)] = 128  # to which a text is cut (embedding), or of a block (language)
    batch_size: Count = 32  # samples per forward pass, outside training

    @property
    def is_stream(self) -> bool:
        """Whether texts are read as a stream."""
        return self.streaming or self.source in STREAMS

    def conflicts(self) -> Iterator[str]:
        """Yields one line for each conflict between these keys."""
        if self.source != "stdlib-docs" and self.path is None:
            what = "a data set, so give its name" if self.source == "hub" else "a file, so give its path"
            yield f"data.path is missing: data.source {self.source!r} reads {what}"
        for key, sources in KEYS_OF_SOURCES.items():
            if getattr(self, key) and self.source not in sources:
                owners = " or ".join(map(repr, sources))
                yield f"data.{key} belongs to data.source {owners}; data.source is {self.source!r}"
        if self.source == "stdlib-docs" and self.path is not None:
            yield f"data.path {self.path} is not read by data.source 'stdlib-docs'; set data.source, such as to 'text'"
        if self.calibration < self.batch_size:
            yield f"data.calibration {self.calibration} is less than one batch of data.batch_size {self.batch_size}"
        if self.is_stream and self.training is not None:
            yield "data.training counts texts in memory; a stream gives what distillation.steps take, so leave it out"
        if not self.is_stream and self.shuffle_buffer != type(self)().shuffle_buffer:
            yield "data.shuffle_buffer is of a stream; data in memory is shuffled as a whole, so leave it out"
        if self.streaming and self.held_out is not None:
            yield "data.held_out is read whole; with data.streaming a tenth of data.path is held out"
        if self.streaming and self.separator not in (None, "\n", "\n\n"):
            yield rf"data.separator is {self.separator!r}; with data.streaming it is '\n' or '\n\n'"
