"""A cascade of two classifiers: a small size answers, and a larger one where the small one's confidence is low.

The threshold is calibrated so that, whatever the data's distribution, answers differ from those of the large size no
more often than stated. The rate of differing answers falls as the threshold rises; so the least threshold whose upper
confidence bound is within the stated rate needs no correction for the number of thresholds (Bates et al., 2021,
"Distribution-free, risk-controlling prediction sets", theorem 1, with the bound of Clopper and Pearson).
"""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flexrank.data.batches import (
    Batch,
    call_model,
    eval_mode,
    model_device,
    output_tensor,
    require_several,
    some_rows,
    to_device,
)
from flexrank.errors import FlexrankError


@dataclasses.dataclass(frozen=True)
class CascadeReport:
    """What a cascade did on N samples."""

    samples: int
    answered_by_small: float  #: the share of samples that the large size did not see
    differing: float  #: the share of samples with another answer than the large size's
    operations_saved: float  #: as a share of the large size's; below 0 if it alone costs less, NaN if none are counted


class Cascade(nn.Module):
    """Logits (B, classes) of `small`, and of `large` for rows whose margin is at most `threshold`.

    The margin is the difference between a row's two largest logits. A cascade is called as the two models are; of each
    tensor with B rows, `large` gets only the uncertain ones. If no row is uncertain, `large` does not run. The logits
    have the wider dtype of those that answered. The two may share their tensors, as `submodel`s of one elastic model
    do, or be deployed models.
    """

    def __init__(self, small: nn.Module, large: nn.Module, threshold: float, report: CascadeReport | None = None):
        super().__init__()
        self.small, self.large, self.threshold = small, large, threshold
        self.report = report  #: on the calibration samples

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: D102
        logits = _logits(self.small(*args, **kwargs))
        uncertain = (~(_margins(logits) > self.threshold)).nonzero()[:, 0]  # NaN is uncertain
        if not len(uncertain):
            return logits
        positional = {str(place): value for place, value in enumerate(args)}
        rows = some_rows(positional | kwargs, uncertain, len(logits))
        assert isinstance(rows, Mapping)
        better = _logits(self.large(*map(rows.get, positional), **{key: rows[key] for key in kwargs}))
        wide = torch.promote_types(logits.dtype, better.dtype)  # else rounding may change the large size's answers
        return logits.to(wide).index_copy(0, uncertain, better.to(logits.device, wide))

    def measure(self, batches: Iterable[Batch]) -> CascadeReport:
        """What the cascade does on other samples; both models run on all of them."""
        return _report(_compare(self.small, self.large, batches), self.threshold)

    def extra_repr(self) -> str:  # noqa: D102
        return f"threshold={self.threshold:.4g}"


def cascade(
    small: nn.Module, large: nn.Module, batches: Iterable[Batch], loss: float, *, confidence_level: float = 0.95
) -> Cascade:
    """A cascade whose answers differ from the large size's with a probability of at most `loss`.

    The accuracy is then at most `loss` below that of the large size, and no labels are needed. This holds with
    probability `confidence_level` over the draw of the calibration samples, for samples of the same distribution. The
    cascade's `report`, with the share that the small size answers, is on the samples that the threshold was chosen on;
    `Cascade.measure` reports on others.

    Args:
        small: returns logits (B, classes), of at least two classes.
        large: as `small`, on the same device.
        batches: independent samples, of the kind that the cascade will see; the more, the closer it gets to `loss`.
        loss: in (0, 1).
        confidence_level: in (0, 1).

    Raises:
        FlexrankError: an argument is out of range, the outputs are not logits or not finite, or there are too few
            samples for the stated loss.
    """
    for name, value in (("loss", loss), ("confidence_level", confidence_level)):
        if not isinstance(value, numbers.Real) or not 0 < value < 1:
            raise FlexrankError(f"{name} is {value!r}; it is a probability between 0 and 1")
    require_several(batches)
    answers = _compare(small, large, batches)
    threshold = _threshold(answers, loss, confidence_level)
    return Cascade(small, large, threshold, _report(answers, threshold))


class _Answers(NamedTuple):
    """Both models' answers to N samples."""

    margins: Tensor  # (N,): the small size's
    differ: Tensor  # (N,) bool
    cost_ratio: float  # the small size's operations over the large one's


def _threshold(answers: _Answers, loss: float, confidence_level: float) -> float:
    """The least threshold above which as few answers differ as `loss` allows; minus infinity if all may pass."""
    allowed = _allowed_differences(len(answers.margins), loss, confidence_level)
    wrong = answers.margins[answers.differ].sort(descending=True).values
    return float(wrong[allowed]) if len(wrong) > allowed else -math.inf


def _allowed_differences(samples: int, loss: float, confidence_level: float) -> int:
    """The most differing answers among N samples whose Clopper–Pearson upper bound is within `loss`."""
    from scipy.stats import binom

    # If each of N samples differs with probability `loss`, at most k do with probability cdf(k).
    allowed = int(binom.ppf(1 - confidence_level, samples, loss))
    allowed -= binom.cdf(allowed, samples, loss) > 1 - confidence_level
    if allowed < 0:
        least = math.ceil(math.log(1 - confidence_level) / math.log(1 - loss))
        raise FlexrankError(f"{samples} samples are too few to prove a loss of {loss}; give at least {least}")
    return allowed


@torch.no_grad()
def _compare(small: nn.Module, large: nn.Module, batches: Iterable[Batch]) -> _Answers:
    margins, differ = [], []
    counter, operations = FlopCounterMode(display=False), [0, 0]
    with eval_mode(small, large):
        for number, batch in enumerate(batches, start=1):
            batch = to_device(batch, model_device(small))
            outputs = []
            for place, model in enumerate((small, large)):
                with counter:  # which begins at 0 again
                    outputs.append(_logits(call_model(model, batch)))
                operations[place] += counter.get_total_flops()
            if outputs[0].shape != outputs[1].shape:
                shapes = " and ".join(str(tuple(output.shape)) for output in outputs)
                raise FlexrankError(f"batch {number}: the logits are {shapes}; both models must answer alike")
            if not all(bool(output.isfinite().all()) for output in outputs):
                raise FlexrankError(f"batch {number}: logits are not finite; check the weights and the batch")
            margins.append(_margins(outputs[0]).cpu())
            differ.append((outputs[0].argmax(-1) != outputs[1].argmax(-1)).cpu())
    if not margins:
        raise FlexrankError("there are no batches to calibrate on; give at least one")
    ratio = operations[0] / operations[1] if operations[1] else math.nan
    return _Answers(torch.cat(margins), torch.cat(differ), ratio)


def _report(answers: _Answers, threshold: float) -> CascadeReport:
    by_small = answers.margins > threshold
    share = float(by_small.double().mean())
    differing = float((by_small & answers.differ).double().mean())
    return CascadeReport(len(by_small), share, differing, share - answers.cost_ratio)


def _logits(output: Any) -> Tensor:
    logits = output_tensor(output)
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise FlexrankError(f"an output has shape {tuple(logits.shape)}; a cascade needs logits (batch, classes)")
    return logits


def _margins(logits: Tensor) -> Tensor:
    """The difference (B,) between each row's two largest logits, in float32."""
    first, second = logits.float().topk(2).values.unbind(1)
    return first - second
