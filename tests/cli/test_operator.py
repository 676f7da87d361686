"""What `tidelane operator` refuses before it connects anywhere."""

from __future__ import annotations

import pytest

from tidelane.cli.main import main


@pytest.mark.parametrize("lease", ["operator", "system/", "/operator", "a/b/c"])
def test_a_lease_is_named_with_its_namespace(
    lease: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert main(["operator", "--agents", "127.0.0.1:1", "--lease", lease]) == 2
    assert capsys.readouterr().err == (
        f"tidelane operator: --lease: {lease} must be NAMESPACE/NAME, such as tidelane-system/tidelane-operator\n"
    )
