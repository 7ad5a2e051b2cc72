# SPDX-License-Identifier: Apache-2.0
"""The model families, by the `model_type` of a checkpoint's config.json.

Other packages offer families as entry points of the group `mmjax.families`: the name of an entry is the `model_type`,
its object a `Family`. An entry is imported when a checkpoint asks for it.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from mmjax.errors import CheckpointError
from mmjax.models import (
    deepseek_v4_1,
    hyperclovax,
    lighton_ocr,
    mistral3,
    pixtral_12b,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    qwen3_vl_moe,
)
from mmjax.models.family import Family

FAMILIES: tuple[Family, ...] = (
    qwen2_vl.FAMILY,
    qwen2_5_vl.FAMILY,
    deepseek_v4_1.FAMILY,
    hyperclovax.FAMILY,
    lighton_ocr.FAMILY,
    mistral3.FAMILY,
    pixtral_12b.FAMILY,
    qwen3_vl.FAMILY,
    qwen3_vl_moe.FAMILY,
)

ENTRY_POINTS = "mmjax.families"  # group under which other packages offer a Family


def family_for(model_type: str) -> Family:
    """The family that serves `model_type`: one of ours, or one that an installed package offers.

    Raises:
      CheckpointError: no family knows it, and the text lists the known ones; several packages serve it; or the one
        that offers it can't be loaded.
    """
    own = [family for family in FAMILIES if model_type in family.model_types]
    offers = offered()
    asked = [offer for offer in offers if offer.name == model_type]
    if len(own) + len(asked) > 1:
        owners = ["mmjax"] * len(own) + [package_of(offer) for offer in asked]
        raise CheckpointError(f"model_type {model_type!r} is served by {' and '.join(owners)}; uninstall all but one")
    if own:
        return own[0]
    if asked:
        return load_offered(asked[0])
    known = {name for family in FAMILIES for name in family.model_types} | {offer.name for offer in offers}
    raise CheckpointError(f"config.json: model_type {model_type!r} is unknown; known: {', '.join(sorted(known))}")


def offered() -> list[EntryPoint]:
    """What installed packages offer, not imported yet."""
    return sorted(entry_points(group=ENTRY_POINTS), key=lambda offer: (offer.name, package_of(offer)))


def load_offered(offer: EntryPoint) -> Family:
    """Imports a family of another package. Raises CheckpointError, naming the package, if it is unusable."""
    told = f"{package_of(offer)} offers the family {offer.name!r} as {offer.value}, which"
    try:
        family = offer.load()
    except Exception as error:  # the other package's code may raise anything
        raise CheckpointError(f"{told} can't be imported: {type(error).__name__}: {error}") from error
    if not isinstance(family, Family):
        raise CheckpointError(f"{told} is a {type(family).__name__}, not a mmjax.models.family.Family")
    if offer.name not in family.model_types:
        raise CheckpointError(f"{told} serves {', '.join(family.model_types)} and not {offer.name!r}")
    return family


def package_of(offer: EntryPoint) -> str:
    """The distribution that an entry point comes from."""
    return offer.dist.name if offer.dist else "a package without a name"
