"""Where the custom resource definitions are, and the names they give the kinds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

GROUP: Final = "tidelane.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "InferenceService"
PLURAL: Final = "inferenceservices"
POLICY_KIND: Final = "SLOPolicy"
POLICY_PLURAL: Final = "slopolicies"
PROFILE_KIND: Final = "ModelProfile"
PROFILE_PLURAL: Final = "modelprofiles"

PLURALS: Final[Mapping[str, str]] = {KIND: PLURAL, POLICY_KIND: POLICY_PLURAL, PROFILE_KIND: PROFILE_PLURAL}
# Objects of the others have a namespace.
CLUSTER_WIDE: Final = frozenset({POLICY_KIND, PROFILE_KIND})


def load(kind: str = KIND) -> Mapping[str, Any]:
    """The CustomResourceDefinition of that kind."""
    here, name = Path(__file__).parent, f"{PLURALS[kind]}.yaml"
    # A wheel carries the file beside this module; a checkout, to which an editable install leads, at its top.
    for folder in (here / "crds", here.parents[2] / "crds"):
        if (folder / name).is_file():
            crd: Mapping[str, Any] = yaml.safe_load((folder / name).read_text(encoding="utf-8"))
            return crd
    raise FileNotFoundError(f"{name} is missing from this installation of tidelane")
