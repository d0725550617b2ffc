"""Self-speculative decoding: sizes of a small Llama draft for the largest size of the same weights.

Uses transformers' assisted generation with a fixed number of drafted tokens, after a short consolidation.
"""

import contextlib
import copy
import functools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import flexrank as fr
from flexrank.calibrate import Hooks
from flexrank.data.text import token_blocks
from flexrank.deployment.machine import interleave, median_ratio
from flexrank.hf.models import load_model, load_tokenizer
from flexrank.run.training import autocast_dtype
from research.assets import assets_directory
from research.benches.language import PYCODE, Texts, subject_of
from research.experiment import Experiment, Ledger, Request
from research.measures import inference, stories
from research.result import Result, goal, measured, table

TEXTS: Texts = PYCODE
#: The sizes that draft; the largest size, which checks, is the complete model.
DRAFTS = (0.7, 0.5, 0.3, 0.2)
#: Batches of calibration; steps of consolidation; tokens drafted at once.
CALIBRATION, STEPS, DRAFTED = 4, 60, 4
#: Prompts, their tokens, tokens generated after each, and timing rounds.
PROMPTS, PROMPT, NEW, REPEATS = 4, 64, 64, 5


def run(request: Request) -> Result:
    """Consolidates, then decodes with every draft."""
    settings = {
        "model": TEXTS[0], "drafts": list(DRAFTS), "calibration batches": CALIBRATION, "steps": STEPS,
        "drafted": DRAFTED, "prompts": PROMPTS, "prompt tokens": PROMPT, "new tokens": NEW,
    }  # fmt: skip
    directory = Ledger(request.work, settings).directory / "elastic"
    if not directory.is_dir():
        consolidate(directory)
    base = load_model(assets_directory(TEXTS[0]) / TEXTS[0], "language")
    data = measure(*fr.load_elastic(directory), base, prompts())
    best = max(row["speed"] for row in data["rows"])
    equal = min(row["equal"] for row in data["rows"])
    goals = [
        goal("outputs equal to greedy decoding of the largest size", f"{PROMPTS} of {PROMPTS} prompts", f"{equal}",
             equal == PROMPTS),
        goal("speed of the best draft, over plain decoding", "above 1", f"{best:.2f}", best > 1),
    ]  # fmt: skip
    return measured(settings | {"machine": "other work may have shared it"}, [_table(data)], goals, data)


def consolidate(directory: Path) -> None:
    """Writes one artefact with the drafts' sizes and the complete model."""
    subject, training = subject_of(TEXTS)
    model, objective = copy.deepcopy(subject.teacher), subject.objective
    batches: Sequence[Any] = subject.calibration[:CALIBRATION]
    layers = fr.select_layers(model)
    moments = fr.collect_moments(model, batches, layers, side="input", gradient_loss=objective.fisher_loss)
    fr.decompose_(model, moments)
    rows = sum(int(batch["attention_mask"].sum()) for batch in batches)
    chain = fr.allocate_ranks(fr.curvature_sensitivity(model, moments, rows), (*DRAFTS, 1.0))
    autocast = autocast_dtype("auto", torch.device("cpu"))
    fr.distill_(
        model, subject.teacher, training, chain, steps=STEPS, learning_rate=2e-4, warmup_steps=5, autocast=autocast
    )
    fr.save_elastic(model, chain, directory)


def prompts() -> list[Tensor]:
    """Returns the first tokens of held-out blocks, (1, PROMPT) each."""
    assets = assets_directory(TEXTS[0], TEXTS[2])
    texts = stories(assets / TEXTS[2])
    blocks = token_blocks(load_tokenizer(assets / TEXTS[0]), texts, TEXTS[4])
    return [block["input_ids"][:, :PROMPT] for block in blocks[:PROMPTS]]


def measure(model: Any, chain: fr.ProfileChain, base: Any, texts: Sequence[Tensor]) -> dict[str, Any]:
    """Returns tokens per second of the base model and of the largest size alone, then a row for every draft."""
    large = fr.submodel(model, chain.entries[-1].profile)
    wanted = [decode(large, text) for text in texts]
    runs = [functools.partial(_decode_all, one, texts) for one in (base, large)]
    with inference(base, large):
        own, others = interleave(runs, REPEATS, warmup=1)
    speeds = [len(texts) * NEW / statistics.median(seconds) for seconds in (own, others)]
    rows = [_measure_draft(model, chain, budget, large, base, texts, wanted) for budget in DRAFTS]
    return {"base": speeds[0], "large": speeds[1], "rows": rows}


def _measure_draft(
    model: Any, chain: fr.ProfileChain, budget: float, large: Any, base: Any, texts: Sequence[Tensor],
    wanted: Sequence[Tensor],
) -> dict[str, Any]:  # fmt: skip
    """Returns what is accepted, and speeds over plain decoding: on shared weights, and of deployed models."""
    entry = chain.entry_at(budget)
    small = drafting(fr.submodel(model, entry.profile))
    with counted_calls(large, small) as calls:
        outputs = [decode(large, text, small) for text in texts]
    checks, drafts = calls[large], calls[small]
    tokens = len(texts) * NEW
    deployed = drafting(fr.deploy(model, entry.profile))
    (rate, speed), (_, of_deployed) = (
        _speed(checker, draft, texts) for checker, draft in ((large, small), (base, deployed))
    )
    return {
        "budget": budget,
        "equal": sum(map(torch.equal, outputs, wanted)),
        "accepted": (tokens - checks) / drafts,
        "tokens": tokens / checks,
        "rate": rate,
        "speed": speed,
        "deployed": of_deployed,
        "bound": tokens / (checks + drafts * chain.model_parameters(entry) / chain.model_parameters(chain.entries[-1])),
    }


def drafting(model: Any) -> Any:
    """Sets the model to draft DRAFTED tokens whatever its confidence, and returns it."""
    settings = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    model.generation_config.update(num_assistant_tokens=DRAFTED, **settings)
    return model


def decode(model: Any, text: Tensor, draft: Any = None) -> Tensor:
    """Returns the prompt and NEW tokens after it, decoded greedily; `draft` may guess them."""
    lengths = {"max_new_tokens": NEW, "min_new_tokens": NEW}
    return model.generate(text, assistant_model=draft, do_sample=False, pad_token_id=0, **lengths)


@contextlib.contextmanager
def counted_calls(*models: nn.Module) -> Iterator[dict[nn.Module, int]]:
    """Counts the calls of each model inside the `with` block."""
    calls = dict.fromkeys(models, 0)

    def count(model: nn.Module, *_: object) -> None:
        calls[model] += 1

    with Hooks() as hooks:
        for model in models:
            hooks.remove_on_exit(model.register_forward_hook(count))
        yield calls


def _decode_all(model: Any, texts: Sequence[Tensor], draft: Any = None) -> None:
    for text in texts:
        decode(model, text, draft)


def _speed(model: Any, draft: Any, texts: Sequence[Tensor]) -> tuple[float, float]:
    """Returns tokens per second of decoding with the draft, and its speed over decoding without one, in turn."""
    runs = [functools.partial(_decode_all, model, texts, one) for one in (draft, None)]
    with inference(model, draft):
        drafted, plain = interleave(runs, REPEATS, warmup=1)
    return len(texts) * NEW / statistics.median(drafted), 1 / median_ratio(drafted, plain)


def _table(data: dict[str, Any]) -> dict[str, Any]:
    keys = ("accepted", "tokens", "rate", "speed", "deployed", "bound")
    columns = [
        "accepted", "tokens per check", "tokens a second, shared weights", "speed, shared weights",
        "speed, base model and deployed draft", "speed, if time were parameters read",
    ]  # fmt: skip
    rows = [[f"{row['budget']:g}", *(row[key] for key in keys)] for row in data["rows"]]
    alone = f"alone the largest size gives {data['large']:.0f} tokens a second, the base model {data['base']:.0f}"
    return table(
        f"{DRAFTED} tokens drafted at once; speeds are over plain decoding; {alone}", ["draft", *columns], rows, 2
    )


EXPERIMENT = Experiment(
    "speculative", "Self-speculative decoding",
    "drafted tokens accepted, and tokens a second over plain greedy decoding, by the draft's budget",
    minutes=12, run=run,
)  # fmt: skip
