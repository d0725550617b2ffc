"""How much a factorised layer must save to be worthwhile: time and quality by size, without training."""

from typing import Any

from flexrank import ProfileChain, allocate_ranks, collect_rows, deploy, distillation_evaluator, probe_sensitivity
from flexrank.deployment.machine import latency_ratio
from flexrank.nn.switch import nested_layers
from flexrank.profiles.costs import MIN_SAVING
from research.benches import language, sts
from research.benches.quality import Subject
from research.experiment import Experiment, Ledger, Request
from research.result import Result, goal, measured, table

RULES, BUDGETS = (0.0, MIN_SAVING, 0.35), (0.9, 0.8, 0.7, 0.5)
#: Seconds for which a size and its base model are timed; the ratio that a size of the default rule may have.
SECONDS, MOST = 2.0, 1.05


def run(request: Request) -> Result:
    """Runs both models; the chains are kept, because probing takes most of the time."""
    subjects = {"all-MiniLM-L6-v2": sts.subject_of()[0], "pycode5m": language.subject_of(language.PYCODE)[0]}
    ledger = Ledger(request.work, {"rules": RULES, "budgets": BUDGETS})
    data = {name: measure(subject, ledger, name) for name, subject in subjects.items()}
    tables = [_table(name, cells) for name, cells in data.items()]
    goals = [_goal(name, cells) for name, cells in data.items()]
    return measured({"least savings": list(RULES), "budgets": list(BUDGETS)}, tables, goals, data)


def measure(subject: Subject, ledger: Ledger, name: str) -> list[dict[str, Any]]:
    """Returns, by rule and budget, time over the base model's with one sample and with a batch, and the first score."""
    model = subject.decomposed("datasvd")
    rows = collect_rows(model, subject.calibration, nested_layers(model))
    evaluate = distillation_evaluator(subject.teacher, subject.probe, subject.objective)
    batch: Any = subject.calibration[len(subject.calibration) // 2]
    one = {key: value[:1] for key, value in batch.items()}
    cells: list[dict[str, Any]] = []

    def allocate(least: float) -> Any:
        return allocate_ranks(probe_sensitivity(model, evaluate, min_saving=least), BUDGETS, min_saving=least).to_json()

    for least in RULES:
        chain = ProfileChain.from_json(ledger.take(f"{name}, {least:g}", allocate, least))
        for budget in BUDGETS:
            small = deploy(model, chain.at(budget), activations=rows)
            ratios = [latency_ratio(small, subject.teacher, inputs, least_seconds=SECONDS) for inputs in (one, batch)]
            (score, *_) = subject.score(small).values()
            cells.append({"least": least, "budget": budget, "ratios": ratios, "score": score})
    return cells


def _table(name: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [[f"at least {least:g}"] for least in RULES]
    for cell in cells:
        rows[RULES.index(cell["least"])].append("{:.2f} {:.2f} {:.4f}".format(*cell["ratios"], cell["score"]))
    return table(f"{name}: time over the base model's with one sample, with a batch; score", ["saved", *BUDGETS], rows)


def _goal(name: str, cells: list[dict[str, Any]]) -> dict[str, Any]:
    worst = max(ratio for cell in cells if cell["least"] == MIN_SAVING for ratio in cell["ratios"])
    return goal(f"{name}: slowest size over its base model", f"at most {MOST}", f"{worst:.2f}", worst <= MOST)


EXPERIMENT = Experiment(
    "saving", "How much a factorised layer must save",
    "time and quality of every size under three least savings, without training", minutes=15, run=run,
)  # fmt: skip
