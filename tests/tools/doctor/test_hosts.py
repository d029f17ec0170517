"""Machines asked over a real sshd on the loopback address: differences, problems, and missing answers."""

from __future__ import annotations

import json
import math
import re
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from refusals import refused_options

from finetrainers.cli.main import main
from finetrainers.tools.doctor.hosts import ANSWER, HostGroup, Node, read_hosts

#: A small torch, so that each machine's costs nothing: with another version on one, broken on another, an hour ahead on
#: a third.
TORCH = """
import os
if "BROKEN" in os.environ: raise ImportError("libcudart.so.12: cannot open shared object file")
__version__ = os.environ.get("TORCH", "2.9.1+cu128")
class version: cuda = "12.8"
class distributed: is_nccl_available = staticmethod(lambda: True)
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    class nccl: version = staticmethod(lambda: (2, 27, 5))
"""
CLOCK = """
import os, time
if "AHEAD" in os.environ:
    real = time.time
    time.time = lambda: real() + float(os.environ["AHEAD"])
"""
SMI = """#!/bin/sh
test "$2" = --format=csv,noheader,nounits || exit 6
echo "0, NVIDIA H100 80GB HBM3, 570.86.15, 81559, 412, 97, 512.34, 700.00, 61, ${ERRORS:-0}, 0, 1980, 1980"
echo "1, NVIDIA H100 80GB HBM3, 570.86.15, 81559, ${USED:-412}, 99, 498.10, 700.00, 64, [N/A], [N/A], 1980, 1980"
"""
#: The interpreter there. A shell's start-up files may speak, and each machine is known by the address that it is asked
#: from.
PYTHON = """#!/bin/sh
echo "welcome to this machine"
export PYTHONPATH={folder}/packages PATH="{folder}/bin:$PATH"
case "$SSH_CLIENT" in
    127.0.0.3*) export TORCH=2.8.0+cu126 ERRORS=2 USED=9000; ulimit -Sn 512 ;;
    127.0.0.4*) export BROKEN=1 AHEAD=3600 ;;
esac
exec {python} "$@"
"""


@pytest.fixture
def cluster(ssh: str, tmp_path: Path) -> Iterator[tuple[list[str], Path]]:
    """Options of the command for machines that an ssh of this test's own knows, and the folder of the hosts file."""
    packages, binaries = tmp_path / "packages", tmp_path / "bin"
    (packages / "torch").mkdir(parents=True)
    (packages / "torch" / "__init__.py").write_text(TORCH)
    (packages / "sitecustomize.py").write_text(CLOCK)
    binaries.mkdir()
    scripts = {binaries / "nvidia-smi": SMI, tmp_path / "python": PYTHON.format(folder=tmp_path, python=sys.executable)}
    for path, text in scripts.items():
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    found = re.search(r"-p (\d+) ", ssh)
    assert found is not None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        lines = ["Host asleep", "ConnectTimeout 1", "Host asleep hangs", f"Port {silent.getsockname()[1]}"]
        lines += ["Host gone", "HostName gone.invalid"]
        for number in (1, 2, 3):
            lines += [f"Host gpu-0{number}", f"BindAddress 127.0.0.{number + 1}"]
        lines += ["Host *", "HostName 127.0.0.1", f"Port {found[1]}"]
        (tmp_path / "ssh_config").write_text("\n".join(lines) + "\n")
        rsh = ssh.replace("-F none", f"-F {tmp_path}/ssh_config").replace(found[0], "")
        arguments = [
            "--rsh",
            rsh,
            "--python",
            str(tmp_path / "python"),
            "--disk_mib",
            "1",
            "--output_dir",
            str(tmp_path / "new"),
        ]
        yield ["doctor", "--hosts", str(tmp_path / "hosts"), *arguments], tmp_path


@pytest.mark.rotating
def test_machines_over_ssh(
    cluster: tuple[list[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, folder = cluster
    (folder / "hosts").write_text("# nodes\ngpu-01 slots=2\ngpu-02  slots=4 # half\n\ngpu-03\ngone\nasleep\n")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("finetrainers.tools.doctor.findings._SLOW", 1e9)  # the speed of a small file is chance
    before = {path.name for path in folder.iterdir()}
    assert main(command) == 1
    said, asking = capsys.readouterr()
    (folder / "said").write_text(said)
    assert "querying 5 machines" in asking
    assert max(map(len, said.splitlines())) <= 80
    table, _, rest = said.partition("\nthe same on")
    rows = {line.split()[0]: " ".join(line.split()) for line in reversed(table.splitlines()) if line.strip()}
    assert {"gpu-01", "gpu-02", "gpu-03", "gone", "asleep"} <= rows.keys()
    assert "505 W" not in table
    assert "1010 of 1400 W" in rows["gpu-01"]
    assert "98%" in rows["gpu-01"]
    assert "64 C" in rows["gpu-01"]
    assert not any(value in rows["gone"] for value in ("H100", "2.9.1"))
    assert "2.8.0+cu126*" in table
    assert "broken*" in table
    assert "+3600.0 s" in table
    rest = " ".join(rest.split())
    assert "GPUs 2 x H100 80GB HBM3" in rest.partition("problems:")[0]
    for expected in (
        "gone: ssh: Could not resolve hostname gone.invalid",
        "asleep: Connection timed out .*`ssh asleep`",
        "gpu-02: 2 GPUs, .*slots=4;",
        "gpu-02: GPU 0 .* 2 .*memory errors",
        "gpu-02: .* 512; .*`ulimit -n 65536`",
        "gpu-02: 8.79 GiB .*GPU 1;",
        r"gpu-02: torch: 2.8.0\+cu126, .* 2.9.1\+cu128;",
        "gpu-03: torch .*ImportError: libcudart.so.12: ",
        "gpu-03: its clock .* 60 min ",
    ):
        assert re.search(expected, rest), (expected, rest)
    assert "gpu-01: " not in rest
    assert rest.count("gpu-03: ") == 2
    assert {path.name for path in folder.iterdir()} - before == {"said"}

    (folder / "hosts").write_text("gpu-01 slots=2\n")
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    [node] = found["machines"]
    assert abs(node["clock_skew_s"]) < 0.5
    assert 0 < node["round_trip_s"] < 1
    assert (node["facts"]["nccl"], node["facts"]["torch_gpus"], node["facts"]["driver"]) == ("2.27.5", 2, "570.86.15")
    assert [gpu["memory_errors"] for gpu in node["facts"]["gpus"]] == [0, None]
    assert node["facts"]["disk_path"] == str(folder)
    assert node["facts"]["disk_write"] > 0


def test_what_ssh_and_the_interpreter_say(cluster: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    command, folder = cluster
    (folder / "hosts").write_text("gpu-01\n")

    def problem(**changed: str) -> str:
        given = [part for name, value in changed.items() for part in (f"--{name}", value)]
        assert main([*command, *given, "--json"]) == 1
        [found] = json.loads(capsys.readouterr().out)["problems"]
        return str(found["text"])

    assert re.search("/nowhere/python .*--python", problem(python="/nowhere/python"))
    (folder / "python").write_text("#!/bin/sh\necho 'python: No module named finetrainers' >&2; exit 1\n")
    assert re.search("No module named finetrainers; .*--python", problem())
    (folder / "python").write_text("#!/bin/sh\necho finetrainers-doctor what; read x; exit 3\n")
    assert re.search("`.*doctor` .* 3: ", problem())
    (folder / "hosts").write_text("hangs\n")
    assert re.search("0.5 s .*--timeout", problem(timeout="0.5"))
    (folder / "hosts").write_text("gpu-01\n")
    rsh = command[command.index("--rsh") + 1].replace("/user ", "/host ")
    assert re.search(r"Permission denied \(publickey.*`ssh gpu-01`.*--rsh", problem(rsh=rsh))


def test_a_machine_without_an_answer_leaves_no_process(tmp_path: Path) -> None:
    """ssh may have started others, as its ProxyCommand, which would hold the connection."""
    connect, started = tmp_path / "connect", tmp_path / "pid"
    connect.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {started}\nwait\n")
    connect.chmod(0o755)
    fleet = HostGroup(str(connect), "python", ["doctor"], timeout_s=1.0)
    (found,) = fleet.ask([Node("a", 8)])
    assert found == Node("a", 8, error=found.error)
    assert "--timeout" in str(found.error)
    left = [psutil.Process(pid) for pid in [int(started.read_text())] if psutil.pid_exists(pid)]
    running = psutil.wait_procs([one for one in left if one.status() != psutil.STATUS_ZOMBIE], timeout=10)[1]
    for one in running:
        one.kill()
    assert running == []


def test_a_connection_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has said nothing that could be read, and will say nothing more."""
    monkeypatch.setattr("finetrainers.tools.doctor.hosts._END_S", 0.2)
    connect = tmp_path / "connect"
    connect.write_text("#!/bin/sh\necho broken >&2; exec >&-; sleep 600\n")
    connect.chmod(0o755)
    (found,) = HostGroup(str(connect), "python", ["doctor"], timeout_s=300.0).ask([Node("a")])
    assert found.facts is None
    assert str(found.error).startswith("`python -m finetrainers doctor` ")
    assert str(found.error).endswith(" -9: broken")


def test_hosts_files(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=8 max_slots=8\n#b\n\nme@c # slots=2\n")
    assert [(node.host, node.slots) for node in read_hosts(path)] == [("a", 8), ("me@c", None)]
    path.write_text("-oProxyCommand=x\na slots=x\nb 8\na\n")
    lines = [(f"{path}:{number}", kind) for number, kind in ((1, "invalid"), (2, "invalid"), (3, "invalid"))]
    with refused_options(*lines, (f"{path}:4", "duplicate")) as caught:
        read_hosts(path)
    for value, problem in zip(
        ("'-oProxyCommand=x'", "'a slots=x'", "'b 8'", "host a"), caught.value.problems, strict=True
    ):
        assert value in problem.message
    path.write_text("# none\n")
    with refused_options(("--hosts", "required")):
        read_hosts(path)
    with refused_options(("--hosts", "not_found")):
        read_hosts(tmp_path / "none")


ANSWERS = (
    {"version_problem": 5}, {"gpus": [{}, 7, {"index": 1}]}, {"gpus": 3},
    {"gpus": [{"name": "A", "index": 0, "utilization": "x", "power_w": 70, "temperature_c": None}, {"index": None}]},
    {"ports": [1]}, {"ports": {"a": {"symbol_error": "x", "active": 1}, "b": 2}}, {"shm": "x"},
    {"disk_free": [1], "disk_path": None}, {"disk_write": math.nan}, {"open_files": {}},
    {"memlock": "x", "ib_active": 1}, {"ib_ports": 2}, {"driver": [1]},
)  # fmt: skip


def test_answers_of_other_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program that answers as no machine does: its facts of other types are left out, and the rest is shown."""
    (tmp_path / "hosts").write_text("".join(f"h{number}\n" for number in range(len(ANSWERS))))
    for number, answer in enumerate(ANSWERS):
        (tmp_path / f"h{number}").write_text(json.dumps({"kernel": f"k{number}", "odd": math.inf, **answer}))
    (tmp_path / "ssh").write_text(
        f"""#!/bin/sh
while test "$1" && ! test -f "{tmp_path}/$1"; do shift; done
while read question; do
    if test $question = clock; then echo "{ANSWER}0"; else echo "{ANSWER}$(cat {tmp_path}/$1)"; exit; fi
done
"""
    )
    (tmp_path / "ssh").chmod(0o755)
    command = ["doctor", "--hosts", str(tmp_path / "hosts"), "--rsh", str(tmp_path / "ssh")]
    assert main(command) in (0, 1)
    table = capsys.readouterr().out
    assert all(f"k{number}" in table for number in range(len(ANSWERS)))
    assert main([*command, "--json"]) in (0, 1)

    def refuse(text: str) -> None:
        raise AssertionError(text)

    machines = json.loads(capsys.readouterr().out, parse_constant=refuse)["machines"]
    facts = [machine["facts"] for machine in machines]
    assert all(fact["kernel"] and fact["odd"] is None for fact in facts), machines
    assert facts[1]["gpus"] == [{"index": 1}]
    assert facts[3]["gpus"] == [{"name": "A", "index": 0, "power_w": 70, "temperature_c": None}]
    assert facts[5]["ports"] == {"a": {"active": 1}}
