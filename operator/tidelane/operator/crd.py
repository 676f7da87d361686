"""Where the custom resource definitions are, and the names they give the kind."""

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

_FILE = "inferenceservices.yaml"


def load() -> Mapping[str, Any]:
    """The CustomResourceDefinition of InferenceService."""
    here = Path(__file__).parent
    # A wheel carries the file beside this module; a checkout, to which an editable install leads, at its top.
    for folder in (here / "crds", here.parents[2] / "crds"):
        if (folder / _FILE).is_file():
            crd: Mapping[str, Any] = yaml.safe_load((folder / _FILE).read_text(encoding="utf-8"))
            return crd
    raise FileNotFoundError(f"{_FILE} is missing from this installation of tidelane")
