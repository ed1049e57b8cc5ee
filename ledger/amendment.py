"""Amendments of a plan: one field, by its dotted path."""

from __future__ import annotations

from pydantic import ValidationError

from shiftbook.ledger.errors import InvalidInput
from shiftbook.ledger.plan import Plan


def planned(plan: Plan, path: str) -> object:
    """Value of a field of the plan by its dotted path; InvalidInput where there is none."""
    value: object = plan.model_dump(mode="json")
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            known = ", ".join(value) if isinstance(value, dict) else "no further fields"
            raise InvalidInput(f"the plan has no field {path!r}: at {name!r}, found {known}")
        value = value[name]
    return value


def amended(plan: Plan, path: str, value: object) -> Plan:
    """A plan with one field changed; InvalidInput where the field or the value is none."""
    planned(plan, path)
    fields = plan.model_dump(mode="json")
    *parents, last = path.split(".")
    target = fields
    for name in parents:
        target = target[name]
    target[last] = value
    try:
        return Plan.model_validate(fields)
    except ValidationError as error:
        raise InvalidInput(
            f"expected a valid value for the plan's {path}, found {value!r} "
            f"({error.errors()[0]['msg']})"
        ) from error
