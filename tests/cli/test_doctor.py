"""`finetrainers doctor` of this machine, alone and for a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from refusals import refused_command

from finetrainers.cli.main import main
from finetrainers.tools.doctor import facts, findings
from finetrainers.tools.doctor.findings import Needs
from finetrainers.tools.doctor.hosts import Node
from finetrainers.tools.doctor.torch_facts import ask_torch
from finetrainers.utils.versions import __version__


def test_this_machine_and_a_run(
    tmp_path: Path, tiny_repo: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is that of the run, and a checkpoint is as large as the run says."""
    asked = ask_torch()
    assert (asked["torch"], asked["torch_gpus"]) == (torch.__version__, torch.cuda.device_count())
    monkeypatch.setattr(facts, "torch_facts", lambda: asked)
    monkeypatch.setenv("COLUMNS", "80")
    config = tmp_path / "run.toml"
    config.write_text(
        f'pretrained_model_name_or_path = "{tiny_repo("ltx_video")}"\noutput_dir = "{tmp_path}/out"\n'
        f'data_root = "none"\nvideo_resolution_buckets = ["9x64x64"]\nrank = 4\ntrain_steps = 2\n'
    )
    seen: list[tuple[Needs | None, list[Node]]] = []
    real = findings.findings
    monkeypatch.setattr(findings, "findings", lambda nodes, needs: seen.append((needs, nodes)) or real(nodes, needs))
    capsys.readouterr()  # libraries have spoken while the model was made
    main(["doctor", str(config), "--disk_mib", "1"])
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.split("\n\n")[0].splitlines())
    assert {"host", "torch", "open files"} <= rows.keys()
    assert "< 0.1 s" in map(str.strip, rows.values())  # a save
    assert rows["finetrainers"].strip() == __version__
    [(needs, [node])] = seen
    assert needs is not None
    assert node.facts is not None
    assert node.facts["disk_path"] == str(tmp_path)
    assert 0 < needs.checkpoint < needs.least < 1 << 25
    assert not (tmp_path / "out").exists()
    assert main(["doctor", str(tmp_path / "none.toml")]) == 2
    assert "none.toml" in capsys.readouterr().err
    assert refused_command(["doctor", "--python", "x"]) == (2, [("--python", "conflict")])
    assert refused_command(["doctor", "--every", "5", "--disk_mib", "1"]) == (2, [("--disk_mib", "conflict")])
    assert refused_command(["doctor", "--hosts", "none", "--rsh", "sh"]) == (2, [("--hosts", "not_found")])
    assert refused_command(["doctor", "--hosts", tmp_path, "--rsh", "sh"]) == (2, [("--hosts", "unreadable")])


def test_a_library_that_is_too_old_is_a_problem_of_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "torch_facts", lambda: {"torch_error": "ImportError: no libcudart"})
    for module in ("cli.main", "tools.doctor.facts"):
        monkeypatch.setattr(f"finetrainers.{module}.version_problem", lambda: "peft 0.1 is too old")
    assert main(["doctor", "--disk_mib", "0", "--output_dir", str(tmp_path)]) == 1
    said, err = capsys.readouterr()
    assert "peft 0.1" in said
    assert "ImportError: no libcudart" in said
    assert err == ""
