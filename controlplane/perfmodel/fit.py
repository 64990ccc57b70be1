"""The fit of the step model to samples, and the choice of its terms by cross-validation.

Coefficients are those of `least_squares.py`. Beyond the four terms of the step model others may join: a Σ
length² term, a constant of the steps that prefill, two hinges of each kind, a mixture's experts. Each joins
only when it lowers the *cross-validated* error by a twentieth: in-sample error always falls. The constant is
judged on the steps that prefill, few among a serving engine's. Repeats of a batch stay in one fold, so that
none is judged on a batch it has seen.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.perfmodel.least_squares import MODEL_TERMS, Fitted, Form, check_distinct, columns_of, solved
from controlplane.perfmodel.profile import FittedRange, Residuals
from controlplane.perfmodel.samples import FEW_POINTS, StepSamples, folds
from controlplane.perfmodel.step import Hinge, HingeOf, PrefillModel, StepModel, Term

MIN_GAIN = 0.05  # of the cross-validated mean error, for a further term to be taken
MAX_KNOTS = 10  # places tried for a hinge
MAX_HINGES = 2  # of a kind
EXACT = 1e-9  # an error that no term can lower
FEW_PREFILLS = 4  # distinct sizes that tell a constant from a slope
OUTLYING = 2.5  # times what all other steps say: no batch is that hard to predict
ALIKE = 4  # steps of the batches most like one's own
MOST_OUTLYING = 0.1  # of the steps; where more are off, the form is wrong and not the steps

_HINGES: dict[Fitted, tuple[HingeOf, ...]] = {
    "mixed": ("prefill_tokens", "sequences"),
    "prefill": ("prefill_tokens",),
    "decode": ("sequences",),
}


@dataclass(frozen=True, slots=True)
class StepFit:
    """A fitted step model, its errors, and the range of its samples."""

    model: StepModel
    residuals: Residuals
    fitted: FittedRange


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """A fitted prefill model and its errors."""

    model: PrefillModel
    residuals: Residuals


def fit_step(
    samples: StepSamples, robust: bool = False, extra_terms: bool = True, quick: bool = False
) -> StepFit:
    """The step model that explains `samples` best, prefill and decode together.

    `robust` gives outliers (a step that met a garbage collection) less weight, after Huber. Without
    `extra_terms` only the four plain coefficients are fitted. `quick`: within a second; terms are chosen on
    five folds however few the batches, and held-out errors are of the terms chosen with all of them. Raises
    BadInput when the samples cannot tell the coefficients apart.
    """
    if len(samples) and not (samples.prefill_tokens > 0).any():
        raise BadInput("measurements: prefill_tokens: all 0; steps with prefill are needed to fit its time")
    if len(samples) and not (samples.sequences > 0).any():
        raise BadInput("measurements: sequences: all 0; steps that decode are needed to fit their time")
    values, hinges, residuals = _fitted(samples, "mixed", robust, extra_terms, quick)
    return StepFit(StepModel(**values, hinges=hinges), residuals, _range(samples))


def fit_prefill(samples: StepSamples, robust: bool = False) -> PrefillFit:
    """The prefill-only model (Eq 2) of those samples in which nothing decoded.

    Raises BadInput when there are too few of them.
    """
    alone = samples.take(samples.sequences == 0)
    values, hinges, residuals = _fitted(alone, "prefill", robust, True)
    return PrefillFit(PrefillModel(**values, hinges=hinges), residuals)


def fit_phases(samples: StepSamples, robust: bool = False) -> tuple[StepFit, PrefillFit]:
    """Models of an engine that never mixes the phases: Eq 3 of its decode steps, Eq 2 of the others.

    The step model's prefill terms are Eq 2's, without its base: what a mixed step would cost if prefill
    added only its own work. Raises BadInput when either phase has too few samples.
    """
    prefill = fit_prefill(samples, robust)
    decode = samples.take(samples.prefill_tokens == 0)
    values, hinges, residuals = _fitted(decode, "decode", robust, True)
    model = StepModel(
        **values,
        per_prefill_token_s=prefill.model.per_token_s,
        per_prefill_sum_sq_s=prefill.model.per_sum_sq_s,
        hinges=(*hinges, *prefill.model.hinges),
    )
    return StepFit(model, residuals, _range(samples)), prefill


def outlying(samples: StepSamples) -> NDArray[np.bool_]:
    """The steps [samples] that took far longer than all others say: something else stopped the engine.

    Neither a robust fit nor the steps of the batches most like it come near such a one. Few of them move a
    mean fit by a lot: two in a hundred, five times as long, by a quarter.
    """
    prefills, decodes = samples.prefill_tokens > 0, samples.sequences > 0
    kinds: tuple[tuple[Fitted, NDArray[np.bool_], NDArray[np.bool_]], ...] = (
        ("prefill", ~decodes, ~decodes),
        ("decode", ~prefills, ~prefills),
        ("mixed", prefills | decodes, prefills & decodes),
    )
    longer = np.ones(len(samples))
    for kind, learned, judged in kinds:
        with suppress(BadInput):  # too few of this kind to say
            values, hinges, _ = _fitted(samples.take(learned), kind, True, True, quick=True)
            terms = tuple(term for term in MODEL_TERMS[kind] if term.name in values)
            columns = columns_of(samples, Form(terms, tuple((h.of, h.start) for h in hinges)))
            sizes = [values[term.name] for term in terms] + [h.per_unit_s for h in hinges]
            longer[judged] = (samples.step_s / np.maximum(columns @ np.array(sizes), 1e-12))[judged]
    place = np.log1p(np.column_stack(samples.batch[:3]))
    found = np.zeros(len(samples), np.bool_)
    for i in np.flatnonzero(longer > OUTLYING):
        away = np.abs(place - place[i]).sum(axis=1)
        away[i] = np.inf
        like = np.argsort(away, kind="stable")[:ALIKE]
        found[i] = longer[i] > OUTLYING * np.median(longer[like])
    return found if found.mean() <= MOST_OUTLYING else np.zeros(len(samples), np.bool_)


def pooled(first: Residuals, second: Residuals) -> Residuals:
    """The errors of two fits as one: means weighted by samples, and the worse of the tails."""
    parts = (first, second)
    n = first.samples + second.samples

    def mean(values: list[float | None]) -> float | None:
        stated = [(v, r.samples) for v, r in zip(values, parts, strict=True) if v is not None]
        return sum(v * k for v, k in stated) / sum(k for _, k in stated) if stated else None

    worst = [r.held_out_max for r in parts if r.held_out_max is not None]
    return Residuals(
        mean_relative=sum(r.mean_relative * r.samples for r in parts) / n,
        p95_relative=max(r.p95_relative for r in parts),
        max_relative=max(r.max_relative for r in parts),
        samples=n,
        held_out_mean=mean([r.held_out_mean for r in parts]),
        held_out_max=max(worst) if worst else None,
        unseen_relative=max(r.unseen_relative for r in parts),
    )


def _fitted(
    samples: StepSamples, fitted: Fitted, robust: bool, extra_terms: bool, quick: bool = False
) -> tuple[dict[str, Any], tuple[Hinge, ...], Residuals]:
    """Coefficients by name, hinges, and the errors."""
    plain = Form.plain(fitted)
    check_distinct(columns_of(samples, plain), samples, [_name(t, fitted) for t in plain.terms])
    fold = folds(samples, 0 if quick else FEW_POINTS)
    form = _chosen(samples, fitted, robust, fold) if extra_terms else plain
    values = solved(columns_of(samples, form), samples.step_s, robust)
    if quick:
        unseen = _held_out(samples, form, robust, fold)
    else:
        unseen = _held_out_of_choice(samples, fitted, robust, extra_terms)
    residuals = _residuals(samples, form, values, unseen, robust)
    numbers = [float(x) for x in values]
    named = {term.name: value for term, value in zip(form.terms, numbers, strict=False)}
    # A slope of 0 is a hinge that the final fit did not want after all.
    pairs = zip(form.knots, numbers[len(form.terms) :], strict=True)
    hinges = tuple(Hinge(of, start, slope) for (of, start), slope in pairs if slope > 0)
    return named, hinges, residuals


def _name(term: Term, fitted: Fitted) -> str:
    return f"prefill.{term.name}" if fitted == "prefill" else term.name


def _range(samples: StepSamples) -> FittedRange:
    return FittedRange(
        float(samples.prefill_tokens.max()),
        float(samples.sequences.max()),
        float(samples.context_tokens.max()),
    )


def _chosen(samples: StepSamples, fitted: Fitted, robust: bool, fold: NDArray[np.int64]) -> Form:
    """Terms added one at a time while each lowers the cross-validated error by MIN_GAIN."""
    form = _start(samples, fitted, robust, fold)
    error = _cross_validated(samples, form, robust, fold)
    while error > EXACT:
        tried = _further(samples, form, fitted)
        errors = [_cross_validated(samples, t, robust, fold) for t in tried]
        if not errors or not min(errors) < error * (1 - MIN_GAIN):
            return form
        form, error = tried[int(np.argmin(errors))], min(errors)
    return form


def _start(samples: StepSamples, fitted: Fitted, robust: bool, fold: NDArray[np.int64]) -> Form:
    """The plain form, and terms of prefilling where there are prefills enough to tell them from k1."""
    form = Form.plain(fitted)
    prefills = samples.prefill_tokens > 0
    few = len(np.unique(samples.prefill_tokens[prefills])) < FEW_PREFILLS
    if few or prefills.all():
        return form
    judged = prefills[fold >= 0]
    for term in [t for t in MODEL_TERMS[fitted] if t.of_prefilling] if judged.any() else ():
        wider = form.with_term(term)
        without, with_it = (
            float(np.mean(_held_out(samples, tried, robust, fold)[judged])) for tried in (form, wider)
        )
        if without > EXACT and with_it < without * (1 - MIN_GAIN):
            form = wider
    return form


def _cross_validated(samples: StepSamples, form: Form, robust: bool, fold: NDArray[np.int64]) -> float:
    return float(np.mean(_held_out(samples, form, robust, fold)))


def _further(samples: StepSamples, form: Form, fitted: Fitted) -> list[Form]:
    """Every way to add one term or hinge."""
    forms = [
        form.with_term(term)
        for term in MODEL_TERMS[fitted]
        if term.words and not term.of_prefilling and term not in form.terms
        if np.any(term.regressor(samples.batch))
    ]
    knots = [(of, knot) for of in _HINGES[fitted] for knot in _knots(samples, form, of)]
    if samples.experts and fitted != "prefill" and ("experts", samples.experts) not in form.knots:
        knots.append(("experts", samples.experts))
    return forms + [replace(form, knots=(*form.knots, knot)) for knot in knots]


def _knots(samples: StepSamples, form: Form, of: HingeOf) -> list[float]:
    """Places for a further hinge of a kind."""
    have = [start for kind, start in form.knots if kind == of]
    if len(have) == MAX_HINGES:
        return []
    values = np.unique(samples.prefill_tokens if of == "prefill_tokens" else samples.sequences)
    inner = values[values > 0][1:-1]  # a hinge at either end is no hinge
    if len(inner) > MAX_KNOTS:
        inner = inner[np.linspace(0, len(inner) - 1, MAX_KNOTS).round().astype(int)]
    return [float(knot) for knot in inner if knot not in have]


def _held_out(samples: StepSamples, form: Form, robust: bool, fold: NDArray[np.int64]) -> NDArray[np.float64]:
    """The absolute relative error of each sample under a fit without its batch."""
    columns = columns_of(samples, form)
    error = np.zeros(len(samples))
    for k in range(fold.max() + 1):
        test = fold == k
        values = solved(columns[~test], samples.step_s[~test], robust)
        error[test] = _errors(columns[test] @ values, samples.step_s[test], robust)
    return error[fold >= 0]


def _residuals(
    samples: StepSamples,
    form: Form,
    values: NDArray[np.float64],
    unseen: NDArray[np.float64],
    robust: bool,
) -> Residuals:
    error = _errors(columns_of(samples, form) @ values, samples.step_s, robust)
    return Residuals(
        mean_relative=float(error.mean()),
        p95_relative=float(np.quantile(error, 0.95)),
        max_relative=float(error.max()),
        samples=len(samples),
        held_out_mean=float(unseen.mean()),
        held_out_max=float(unseen.max()),
    )


def _held_out_of_choice(
    samples: StepSamples, fitted: Fitted, robust: bool, extra_terms: bool
) -> NDArray[np.float64]:
    """As `_held_out`, with the terms chosen again without the fold: the choice is part of the fit."""
    fold = folds(samples)
    error = np.zeros(len(samples))
    for k in range(fold.max() + 1):
        test = fold == k
        train, judged = samples.take(~test), samples.take(test)
        form = _chosen(train, fitted, robust, folds(train)) if extra_terms else Form.plain(fitted)
        values = solved(columns_of(train, form), train.step_s, robust)
        predicted = columns_of(judged, form) @ values
        error[test] = _errors(predicted, judged.step_s, robust)
    return error[fold >= 0]


def _errors(
    predicted_s: NDArray[np.float64], step_s: NDArray[np.float64], robust: bool
) -> NDArray[np.float64]:
    """Absolute relative errors. Of a robust fit 1 at most: a step told of as nothing is one wrong step."""
    error = np.abs(predicted_s / step_s - 1.0)
    return np.minimum(error, 1.0) if robust else error
