"""Expressions that are affine in the unknowns of the policy search: one account of costs, used three ways.

Seconds per lane and bytes per memory are written once, as `Affine`. Put values in and they are a prediction
(`at`); hand the coefficients to the solver and they are a constraint; let the coefficients be arrays over many
micro-batches and they are a bound. So the program, the bound and the prediction cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Affine", "Number", "total"]

Number: TypeAlias = "float | npt.NDArray[np.float64]"
"""A number, or an array of them over candidate batches."""


@dataclass(frozen=True, slots=True)
class Affine:
    """``constant + sum(coefficients[name] * unknown[name])``.

    Attributes
    ----------
    constant : float or ndarray
        Part that no unknown changes.
    coefficients : mapping of str to float or ndarray
        By name of the unknown.
    """

    __array_ufunc__: ClassVar[None] = None  # array + Affine is ours to answer, not numpy's

    constant: Number = 0.0
    coefficients: Mapping[str, Number] = field(default_factory=dict)

    @staticmethod
    def of(name: str, coefficient: Number = 1.0) -> Affine:
        """The unknown `name` times `coefficient`."""
        return Affine(0.0, {name: coefficient})

    def __add__(self, other: Affine | Number) -> Affine:
        if not isinstance(other, Affine):
            return Affine(self.constant + other, self.coefficients)
        merged = dict(self.coefficients)
        for name, value in other.coefficients.items():
            merged[name] = merged[name] + value if name in merged else value
        return Affine(self.constant + other.constant, merged)

    __radd__ = __add__

    def __neg__(self) -> Affine:
        return self * -1.0

    def __sub__(self, other: Affine | Number) -> Affine:
        return self + (-other)

    def __rsub__(self, other: Number) -> Affine:
        return (-self) + other

    def __mul__(self, factor: Number) -> Affine:
        return Affine(self.constant * factor, {name: value * factor for name, value in self.coefficients.items()})

    __rmul__ = __mul__

    def __truediv__(self, divisor: Number) -> Affine:
        return self * (1.0 / divisor)

    def at(self, values: Mapping[str, float]) -> Any:
        """Value of the expression [float or ndarray]; an unknown that `values` lacks counts as zero."""
        result: Any = self.constant
        for name, value in self.coefficients.items():
            known = values.get(name, 0.0)
            if known:
                result = result + value * known
        return result

    def coefficient(self, name: str) -> Any:
        """Coefficient of the unknown `name`, zero where it does not appear."""
        return self.coefficients.get(name, 0.0)

    def substitute(self, values: Mapping[str, float]) -> Affine:
        """The expression with the named unknowns replaced by numbers; the others stay."""
        constant: Any = self.constant
        rest: dict[str, Number] = {}
        for name, value in self.coefficients.items():
            if name not in values:
                rest[name] = value
            elif values[name]:
                constant = constant + value * values[name]
        return Affine(constant, rest)


def total(terms: Iterable[Affine | Number]) -> Affine:
    """Sum of expressions and numbers."""
    result = Affine()
    for term in terms:
        result = result + term
    return result
