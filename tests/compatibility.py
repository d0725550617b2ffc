"""What works on which architecture: each one goes all the way, and docs/compatibility.md is the table of what happened.

`python tests/compatibility.py` writes the page; `test_compatibility.py` goes the same way and compares each row. With
`--programs` it also writes every architecture for every runtime, ten minutes more; tests marked `programs` compare
those rows, and `deployment/test_formats.py` some of their cells every time.
"""

import contextlib
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import transformers

import flexrank as fr
import tiny
from flexrank.deployment import exports
from flexrank.deployment.runtimes import RUNTIMES
from flexrank.distill.objectives import FeatureObjective, LogitObjective
from flexrank.errors import FlexrankError
from flexrank.nn.select import dense_reasons
from tiny import outputs, relative, same_state
from tiny_runs import here

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
BUDGETS = (0.75, 0.5)
#: Of the elastic model's outputs at a profile and those of what is deployed there; every layer may add 2e-6.
DEPLOYED_BOUND = 5e-5
NAMES = {
    "llama_untied": "Llama", "llama_tied": "Llama, tied head", "qwen3": "Qwen 3", "gemma3": "Gemma 3, text",
    "mistral": "Mistral", "phi3": "Phi 3", "gpt2": "GPT-2", "gpt_neox": "GPT-NeoX", "opt": "OPT", "mixtral": "Mixtral",
    "qwen3_moe": "Qwen 3 MoE", "bert": "BERT", "t5": "T5", "bart": "BART", "vit": "ViT", "dinov3": "DINOv3",
}  # fmt: skip


class Way:
    """One architecture's way through the stages; each step checks what it makes, by oracles of its own."""

    def __init__(self, name: str, directory: Path):
        self.name, self.directory = name, directory
        self.auto = getattr(transformers, tiny.AUTO[name])
        self.teacher, self.batch = tiny.build(name), tiny.batch_for(name)
        self.batches = [self.batch, {key: value.flip(0) for key, value in self.batch.items()}]
        self.deployed: dict[float, Any] = {}
        self.wanted: dict[float, Any] = {}

    def decompose(self) -> str:
        """Full rank equals the original. Says whether the model was decomposed a block at a time, or whole."""
        model = tiny.build(self.name)
        fr.separate_experts_(model)
        self.layers = list(fr.select_layers(model))
        self.reasons = set(dense_reasons(model).values())
        with _logged() as notes:
            fr.decompose_to_disk(model, self.batches, self.layers, self.directory / "initial")
        self.model, _ = fr.load_elastic(self.directory / "initial")
        assert relative(outputs(self.model, self.batch), outputs(self.teacher, self.batch)) < 1e-5
        return "whole" if any("one pass" in note for note in notes) else "by block"

    def allocate(self) -> None:
        """The probe's ranks for two budgets are within them, and nested."""
        objective = LogitObjective() if hasattr(self.teacher(**self.batch), "logits") else FeatureObjective()
        self.objective, self.evaluate = objective, fr.distillation_evaluator(self.teacher, self.batches, objective)
        table = fr.probe_sensitivity(self.model, self.evaluate, num_levels=3)
        self.chain = fr.allocate_ranks(table, BUDGETS)
        large, small = (self.chain.at(budget) for budget in BUDGETS)
        assert large != small and all(small[name] <= large[name] for name in self.layers)
        parameters = [self.chain.entry_at(budget).parameters for budget in BUDGETS]
        assert all(
            count <= budget * self.chain.dense_parameters for count, budget in zip(parameters, BUDGETS, strict=True)
        )

    def distill(self) -> None:
        """The two sizes come closer to the teacher, by a tenth of both losses."""
        before = self._losses()
        options: dict[str, Any] = {"steps": 24, "warmup_steps": 2, "learning_rate": 5e-4}
        fr.distill_(self.model, self.teacher, self.batches, self.chain, objective=self.objective, **options)
        assert sum(self._losses()) < 0.9 * sum(before)
        fr.save_elastic(self.model, self.chain, self.directory / "elastic")

    def _losses(self) -> list[float]:
        losses = []
        for budget in BUDGETS:
            with fr.use_profile(self.model, self.chain.at(budget)):
                losses.append(self.evaluate(self.model))
        return losses

    def deploy(self) -> None:
        """Outputs are the elastic model's at the profile, with fewer parameters."""
        rows = fr.collect_rows(self.model, self.batches, fr.nested_layers(self.model))
        for budget in BUDGETS:
            profile = self.chain.at(budget)
            with fr.use_profile(self.model, profile):
                self.wanted[budget] = outputs(self.model, self.batch)
            self.deployed[budget] = fr.deploy(self.model, profile, activations=rows)
            self._require_equal(self.deployed[budget], budget)
            assert _parameters(self.deployed[budget]) < _parameters(self.teacher)

    def export(self) -> None:
        """The export reloads with equal outputs and no missing tensor, or raises."""
        for budget, small in self.deployed.items():
            fr.export(small, self.directory / f"{budget}", self.batch)

    def load(self) -> None:
        """transformers' auto class loads the same bits and ties, to be trained on, and saves them again."""
        for budget, small in self.deployed.items():
            place = self.directory / f"{budget}"
            again, report = self.auto.from_pretrained(place, output_loading_info=True)
            assert not any(report.values()) and type(again) is type(small) and same_state(again, small)
            assert [key for key, _ in again.named_parameters()] == [key for key, _ in small.named_parameters()]
            self._require_equal(again, budget)
            assert all(parameter.requires_grad for parameter in again.parameters())
        again.save_pretrained(self.directory / "again")
        assert same_state(self.auto.from_pretrained(self.directory / "again"), small)

    def cut(self) -> None:
        """transformers' auto class cuts a size of the elastic artefact, which is then saved as any other."""
        for budget in BUDGETS:
            config = fr.FlexRankConfig(budget=budget)
            size = self.auto.from_pretrained(self.directory / "elastic", quantization_config=config)
            assert type(size) is type(self.teacher) and not size.training
            assert _parameters(size) < _parameters(self.teacher)
            self._require_equal(size, budget)
        size.save_pretrained(self.directory / "size")
        assert same_state(self.auto.from_pretrained(self.directory / "size"), size)

    def multiply_out(self) -> None:
        """The dense export is the base model's class, with its layers and config; `export_to` compares outputs."""
        fr.export_to(self.directory / "0.5", "dense", self.directory / "dense")
        plain = self.auto.from_pretrained(self.directory / "dense")
        assert plain.state_dict().keys() == self.teacher.state_dict().keys()
        assert not {"quantization_config", "separate_experts"} & plain.config.to_dict().keys()

    def _require_equal(self, model: Any, budget: float) -> None:
        assert relative(outputs(model, self.batch), self.wanted[budget]) < DEPLOYED_BOUND


#: What the page's columns are called, and what is done for each.
STEPS: dict[str, Callable[[Way], str | None]] = {
    "decompose": Way.decompose,
    "probe, allocate": Way.allocate,
    "distill": Way.distill,
    "deploy": Way.deploy,
    "export": Way.export,
    "from_pretrained": Way.load,
    "a size of elastic": Way.cut,
    "dense": Way.multiply_out,
}
HEAD = f"""# Compatibility

Each row of the first table shows what a test finds: it builds a small model of the architecture, with random weights
and biases, and takes it through all stages on rows with padding. `python tests/compatibility.py` writes this page, and
`pytest tests/test_compatibility.py` fails if the table is wrong.

- **decompose**: outputs at full rank equal the original's within 1e-5; *by block* means that one block is in memory at
  a time, *whole* that blocks cannot run alone.
- **probe, allocate**: nested ranks for the budgets {BUDGETS[0]} and {BUDGETS[1]}, which the following columns use.
- **distill**: both sizes get closer to the teacher.
- **deploy**, **export**, **from_pretrained** of transformers' auto class, **a size of elastic** (`from_pretrained` of
  the elastic artefact with `quantization_config=fr.FlexRankConfig(budget=0.5)`): outputs equal the elastic model's
  at those ranks within {DEPLOYED_BOUND:g}; the loaded model has the ties, names and bits of the saved one.
- **dense**: `flexrank export --to dense`, which plain transformers loads.

Embeddings always stay dense and are not listed. Everything is in float32 on a CPU.

"""

TITLE = "\n## Programs of other runtimes\n"
PROGRAMS_HEAD = f"""{TITLE}
A test of each row exports the architecture, deployed at half its size, to each runtime, which runs it on two shapes.
*yes* means an output within the bound of [deployment.md](deployment.md#other-runtimes); *refused* means a one-line
error, with nothing written. All rows take ten minutes, so `make test` leaves them out:

```sh
pytest -m programs tests/test_compatibility.py    # fails if a row is wrong
python tests/compatibility.py --programs          # rewrites these rows of the page
```

`make test` itself holds {{tested}}, and the refusals of T5 and BART.

"""


def row_of(name: str, directory: Path) -> list[str]:
    """The cells of one architecture; what a step should give and does not is an AssertionError."""
    way = Way(name, directory)
    cells = {column: _outcome(step, way) for column, step in STEPS.items()}
    kinds = " ".join(dict.fromkeys(f"`{layer.rpartition('.')[2]}`" for layer in way.layers))
    return [NAMES[name], kinds, _dense_parts(way), *cells.values()]


def programs_of(name: str, directory: Path) -> list[str]:
    """The cells of one architecture's programs."""
    tiny.deployed(name).save_pretrained(directory / "small")
    cells = [NAMES[name]]
    for runtime in RUNTIMES:
        try:
            fr.export_to(directory / "small", runtime, directory / runtime)
            cells.append("yes")
        except FlexrankError as error:
            print(f"{name}: {error}", file=sys.stderr)
            cells.append("refused")
    return cells


def _outcome(step: Callable[[Way], str | None], way: Way) -> str:
    try:
        return step(way) or "yes"
    except FlexrankError:
        return "refused"


def _dense_parts(way: Way) -> str:
    """Why other layers than embeddings stay dense."""
    reasons = sorted(reason.partition(" with parameter")[0] for reason in way.reasons - {"embedding"})
    return ", ".join("tied head" if reason.startswith("weight tied") else reason for reason in reasons) or "–"


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def line(cells: Sequence[str]) -> str:
    """A row of the page."""
    return f"| {' | '.join(cells)} |"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of the page."""
    return "\n".join(map(line, [columns, ["---"] * len(columns), *rows])) + "\n"


def page(rows: Sequence[Sequence[str]], programs: str) -> str:
    """The whole page of these rows, and its part about programs."""
    return HEAD + table(["architecture", "layers", "left dense", *STEPS], rows) + programs


def programs_part(rows: Sequence[Sequence[str]]) -> str:
    """The part of the page about programs of other runtimes."""
    tested = [f"{NAMES[name]} ({runtime})" for runtime, names in tiny.PROGRAMS.items() for name in names]
    return PROGRAMS_HEAD.format(tested=", ".join(tested)) + table(["architecture", *RUNTIMES], rows)


def written_programs() -> str:
    """The part about programs as it is on the page."""
    text = PAGE.read_text(encoding="utf8")
    return text[text.index(TITLE) :]


@contextlib.contextmanager
def _logged() -> Iterator[list[str]]:
    """What flexrank logs inside the block."""
    log, notes = logging.getLogger("flexrank"), list[str]()
    handler, level = logging.Handler(), log.level
    handler.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield notes
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


if __name__ == "__main__":
    exports.in_fresh_process = here
    with tempfile.TemporaryDirectory() as scratch:
        if "--programs" in sys.argv:
            part = programs_part([programs_of(name, Path(scratch, f"{name}-programs")) for name in NAMES])
        else:
            part = written_programs()
        PAGE.write_text(page([row_of(name, Path(scratch, name)) for name in NAMES], part), encoding="utf8")
