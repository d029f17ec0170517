"""The cluster recipes run with stand-ins for the cluster's commands: places, flags, stopping, requeueing, copies."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import launch_command, launch_command_parser
from torch.distributed import run as torchrun

from finetrainers.config.flags import parse_flags
from finetrainers.config.root import TrainConfig

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "examples" / "cluster"
NODE = CLUSTER / "node.sh"
SBATCH = CLUSTER / "slurm" / "train.sbatch"
SCRIPTS = sorted([*CLUSTER.rglob("*.sh"), SBATCH])
TASKS = ("single_node", "multi_node")
LORA = ("--config", "examples/ltx_video/lora.toml")

#: A launcher that notes how it was called and does what $STUB_RESULT says, as accelerate would: 75 becomes 1.
ACCELERATE = """#!{python} -IS
import json, os, pathlib, sys, time
rank, root = os.environ.get("MACHINE_RANK", "0"), pathlib.Path(os.environ["OUTPUT_DIR"])
call = {{"argv": sys.argv[1:], "env": dict(os.environ)}}
pathlib.Path({folder!r}, f"accelerate-{{rank}}.json").write_text(json.dumps(call))
result = os.environ.get("STUB_RESULT", "done")
root.mkdir(parents=True, exist_ok=True)
control = root / "control"
if result == "waits":
    time.sleep(0.3)  # loads; a stop that comes now must not get lost
    control.mkdir()
    while not (control / "stop").exists():
        time.sleep(0.02)
    result = "stopped"
if result == "stopped" and rank == "0":
    with open(root / "events.jsonl", "a") as file:
        file.write(json.dumps({{"time": 2.0, "event": "stopped", "step": 7}}) + "\\n")
sys.exit(int(result != "done"))
"""
#: The step of a job, node by node; the highest exit code, or $STUB_SRUN_CODE.
SRUN = """#!{python} -IS
import json, os, pathlib, subprocess, sys
command = sys.argv[1:]
options = [command.pop(0) for _ in command[:] if command[0].startswith("-")]
pathlib.Path({folder!r}, "srun.json").write_text(json.dumps(options))
codes = []
for node in range(int(os.environ["SLURM_JOB_NUM_NODES"])):
    codes.append(subprocess.run(command, env={{**os.environ, "SLURM_NODEID": str(node)}}).returncode)
sys.exit(int(os.environ.get("STUB_SRUN_CODE", max(codes))))
"""
SCONTROL = """#!/bin/bash
if [[ "$1 $2" == "show hostnames" ]]; then printf 'gpu-03\\ngpu-07\\n'; else echo "$*" >>{folder}/scontrol; fi
"""
NVIDIA_SMI = """#!/bin/bash
if [[ "$1" == -L ]]; then printf 'GPU %s: a card\\n' 0 1 2 3; else echo "said by nvidia-smi ${{*: -1}}"; fi
"""
#: Runs here what is meant for another host; `dead` does not answer.
SSH = """#!/bin/bash
while [[ "$1" == -* ]]; do shift 2; done
[[ "$1" != dead ]] || {{ echo "connection timed out" >&2; exit 255; }}
shift
exec "$@"
"""
JOB = {
    "SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu-[03,07]",
    "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "64",
}  # fmt: skip
SKY = {
    "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.9",
}  # fmt: skip


class Stage:
    """A folder of stand-ins that comes first on the path, and what they noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "the run"
        stand_ins = {
            "accelerate": ACCELERATE, "srun": SRUN, "scontrol": SCONTROL, "nvidia-smi": NVIDIA_SMI, "ssh": SSH,
        }  # fmt: skip
        for name, text in stand_ins.items():
            file = folder / "bin" / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(text.format(python=sys.executable, folder=str(folder)))
            file.chmod(0o755)

    def checkout(self, *, virtual_environment: bool) -> Path:
        """The repository as a script finds it; of a virtual environment, whose own launcher would come first, an empty
        one."""
        found = self.folder / ("installed" if virtual_environment else "checkout")
        if not found.exists():
            found.mkdir()
            for entry in ("examples", "accelerate_configs", "train.py"):
                (found / entry).symlink_to(ROOT / entry)
            if virtual_environment:
                (found / ".venv" / "bin").mkdir(parents=True)
                (found / ".venv" / "bin" / "activate").write_text("")
        return found

    def environment(self, **changes: str) -> dict[str, str]:
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SKYPILOT_"))}
        return {**kept, "PATH": path, "OUTPUT_DIR": str(self.run_dir), "HOME": str(self.folder), **changes}

    def run(self, *command: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, command)), cwd=self.checkout(virtual_environment=False), env=self.environment(**changes),
            check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def call(self, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.folder / f"accelerate-{rank}.json").read_text())

    @property
    def requeued(self) -> list[str]:
        noted = self.folder / "scontrol"
        return noted.read_text().splitlines() if noted.exists() else []


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(f"--{name}") + 1]


def training(argv: list[str]) -> TrainConfig:
    """The configuration that train.py would make of a launch."""
    assert (ROOT / option(argv, "config_file")).is_file()
    config, _ = parse_flags(argv[argv.index("train.py") + 1 :])
    assert config is not None
    return config


# ---- all scripts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_scripts_parse(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(len(line) <= 120 for line in script.read_text(encoding="ascii").splitlines())


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_is_content() -> None:
    command = ["shellcheck", "--external-sources", "--severity=warning", *map(str, SCRIPTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("config", ["ddp", "fsdp2", "deepspeed_zero2"])
def test_accelerate_understands_the_places(config: str, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What accelerate hands to torch's launcher, for each strategy."""
    file = f"accelerate_configs/{config}.yaml"
    machine = {"NUM_MACHINES": "2", "MACHINE_RANK": "1", "MAIN_PROCESS_IP": "10.0.0.5", "GPUS_PER_MACHINE": "4"}
    done = stage.run("bash", NODE, *LORA, ACCELERATE_CONFIG=file, LOG_DIR=str(stage.folder / "logs"), **machine)
    assert done.returncode == 0, done.stderr
    argv = stage.call(rank=1)["argv"]
    handed_over: list[argparse.Namespace] = []
    monkeypatch.setattr(torchrun, "run", handed_over.append)
    monkeypatch.chdir(ROOT)
    launch_command(launch_command_parser().parse_args(argv[1:]))
    [arguments] = handed_over
    launch, _, words = torchrun.config_from_args(arguments)
    assert (launch.min_nodes, launch.max_nodes, launch.nproc_per_node) == (2, 2, 4)
    assert (launch.rdzv_backend, launch.rdzv_endpoint) == ("static", "10.0.0.5:29500")
    assert launch.rdzv_configs["rank"] == 1
    assert launch.logs_specs.root_log_dir == str(stage.folder / "logs" / "machine-1")
    assert words[-len(argv[argv.index("train.py") :]) :] == argv[argv.index("train.py") :]


# ---- one node -------------------------------------------------------------------------------------------------------


def test_node_needs_a_directory_and_something_to_run(stage: Stage) -> None:
    for arguments, changes, missing in (
        ([*LORA], {"OUTPUT_DIR": ""}, "set OUTPUT_DIR"),
        ([], {}, "give flags"),
        (["examples/ltx_video/lora.toml"], {}, "give flags"),
        ([*LORA], {"GPUS_PER_MACHINE": "8", "NUM_MACHINES": "2"}, "MACHINE_RANK=0"),
        ([*LORA, "--output_dir=elsewhere"], {}, "instead of --output_dir"),
        ([*LORA], {"GPUS_PER_MACHINE": "0"}, "no GPU is visible"),
    ):
        done = stage.run("bash", NODE, *arguments, **changes)
        assert done.returncode == 2
        assert missing in done.stderr
    assert not stage.run_dir.exists()


def test_node_alone_uses_all_gpus_and_goes_on_by_itself(stage: Stage) -> None:
    done = stage.run("bash", NODE, "--config", "examples/ltx_video/grpo_lora.toml", "--lr", "5e-5")
    assert (done.returncode, done.stderr) == (0, "")
    call = stage.call()
    assert call["argv"][:5] == ["launch", "--config_file", "accelerate_configs/ddp.yaml", "--num_processes", "4"]
    config = training(call["argv"])
    assert (config.training.method, config.optimizer.lr) == ("grpo", 5e-5)
    assert config.training.resume_from_checkpoint == "auto"
    assert config.run.output_dir == stage.run_dir
    assert call["env"]["FINETRAINERS_RUN"] == str(stage.run_dir)
    # A wish of the user's comes later on the command line, and wins.
    stage.run("bash", NODE, *LORA, "--resume_from_checkpoint", "40")
    assert training(stage.call()["argv"]).training.resume_from_checkpoint == "40"


@pytest.mark.rotating
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_becomes_the_stop_file(number: signal.Signals, stage: Stage) -> None:
    """The whole group gets it, as from Slurm or Ctrl-C; the launcher must not, since it would kill in half a minute."""
    process = subprocess.Popen(
        ["bash", str(NODE), *LORA], cwd=ROOT, env=stage.environment(STUB_RESULT="waits"), start_new_session=True
    )
    noted = stage.folder / "accelerate-0.json"
    deadline = time.monotonic() + 20
    while not noted.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, number)
    assert process.wait(timeout=30) == 75
    assert '"stopped"' in (stage.run_dir / "events.jsonl").read_text()


# ---- Slurm ----------------------------------------------------------------------------------------------------------


def test_slurm_directives() -> None:
    lines = SBATCH.read_text(encoding="ascii").splitlines()
    places = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert all(line.startswith("#") or not line for line in lines[: places[-1]]), "Slurm reads none after a command"
    directives = dict(lines[number].removeprefix("#SBATCH --").partition("=")[::2] for number in places)
    assert directives["ntasks-per-node"] == "1"
    assert directives["open-mode"] == "append"
    assert "requeue" in directives
    # To the tasks, not to the batch script (B:), and with time for a step and a checkpoint.
    sent = re.fullmatch(r"USR1@(\d+)", directives["signal"])
    assert sent is not None
    assert int(sent[1]) >= 600


def test_slurm_job_of_two_nodes(stage: Stage) -> None:
    done = stage.run("bash", SBATCH, "--config", "examples/hunyuan_video/grpo_16gpu.toml", "--lr", "5e-5", **JOB)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        argv = stage.call(rank)["argv"]
        places = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port")
        assert [option(argv, name) for name in places] == ["16", "2", str(rank), "gpu-03", "23456"]
        assert option(argv, "log_dir") == str(stage.run_dir / "logs" / "job-123456-0" / f"machine-{rank}")
        config = training(argv)
        assert (config.training.method, config.grpo.prompts_per_step, config.optimizer.lr) == ("grpo", 16, 5e-5)
        assert config.training.resume_from_checkpoint == "auto"
        assert config.run.output_dir == stage.run_dir
    environment = stage.call()["env"]
    assert environment["OMP_NUM_THREADS"] == "1" if "OMP_NUM_THREADS" in os.environ else "5"
    assert environment["NCCL_DEBUG"] == "WARN"
    assert set(json.loads((stage.folder / "srun.json").read_text())) == {
        "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--label", "--cpus-per-task=64",
    }  # fmt: skip
    assert stage.requeued == []


def test_slurm_job_in_a_container(stage: Stage) -> None:
    stage.run("bash", SBATCH, *LORA, CONTAINER_IMAGE="/images/ft.sqsh", CONTAINER_MOUNTS="/clips:/clips", **JOB)
    options = json.loads((stage.folder / "srun.json").read_text())
    assert "--container-image=/images/ft.sqsh" in options
    checkout = stage.checkout(virtual_environment=False)
    assert f"--container-mounts={checkout}:{checkout},{stage.run_dir}:{stage.run_dir},/clips:/clips" in options


@pytest.mark.parametrize(
    ("changes", "code", "requeued"),
    [
        pytest.param({"STUB_RESULT": "done"}, 0, False, id="done"),
        pytest.param({"STUB_RESULT": "failed"}, 1, False, id="failed"),
        pytest.param({"STUB_RESULT": "stopped"}, 75, True, id="stopped"),
        pytest.param({"STUB_RESULT": "stopped", "STUB_SRUN_CODE": "137"}, 75, True, id="stopped-nodes-killed"),
        pytest.param({"STUB_RESULT": "stopped", "SLURM_RESTART_COUNT": "100"}, 75, False, id="often-enough"),
    ],
)
def test_slurm_requeues_what_was_stopped(changes: dict[str, str], code: int, requeued: bool, stage: Stage) -> None:
    # An earlier part of the run was stopped too: that one must not count again.
    stage.run_dir.mkdir()
    (stage.run_dir / "events.jsonl").write_text('{"time": 1.0, "event": "stopped", "step": 3}\n')
    done = stage.run("bash", SBATCH, *LORA, **JOB, **changes)
    assert done.returncode == code, done.stderr
    assert stage.requeued == (["requeue 123456"] if requeued else [])


# ---- SkyPilot -------------------------------------------------------------------------------------------------------

#: Fields that SkyPilot documents, and which of them these recipes may use.
TASK_FIELDS = {
    "name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes", "file_mounts", "setup", "run", "config",
}  # fmt: skip
RESOURCE_FIELDS = {
    "infra", "accelerators", "accelerator_args", "cpus", "memory", "instance_type", "use_spot", "disk_size",
    "disk_tier",
    "network_tier", "image_id", "ports", "labels", "autostop", "any_of", "ordered", "job_recovery",
}  # fmt: skip


def task(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / "skypilot" / f"{name}.yaml").read_text(encoding="ascii"))


def install_command() -> str:
    """What README.md tells to install, first of all."""
    [line] = re.findall(r"^pip install .*\[demo\].*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    return line


@pytest.mark.parametrize("name", TASKS)
def test_skypilot_fields(name: str) -> None:
    document = task(name)
    assert set(document) <= TASK_FIELDS
    resources = document["resources"]
    assert set(resources) <= RESOURCE_FIELDS
    assert resources["job_recovery"] == {"recover_on_exit_codes": [75], "max_restarts_on_errors": 2}
    assert re.fullmatch(r"[A-Z0-9]+:\d+", resources["accelerators"])
    assert document["workdir"] == "."
    assert install_command() in document["setup"].splitlines()
    for mount in document.get("file_mounts", {}).values():
        assert set(mount) <= {"name", "source", "store", "persistent", "mode"}
        assert mount["mode"] in ("MOUNT", "COPY", "MOUNT_CACHED")
    for line in (document["setup"], document["run"]):
        assert subprocess.run(["bash", "-n"], input=line, text=True, check=False).returncode == 0


def test_skypilot_volume_is_the_one_that_is_mounted() -> None:
    volume = task("volume")
    assert set(volume) <= {"name", "type", "infra", "size", "labels", "use_existing", "config"}
    assert task("multi_node")["volumes"] == {"/shared": volume["name"]}
    assert volume["config"]["access_mode"] == "ReadWriteMany"


def run_task(stage: Stage, name: str, *, at: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a task's `run` as a script, with its mount points below a folder, in a checkout with a virtual
    environment."""
    document = task(name)
    script = document["run"]
    for mount in ("/bucket", "/shared"):
        script = script.replace(f'"{mount}/', f'"{at}{mount}/')
    checkout = stage.checkout(virtual_environment=True)
    environment = {key: str(value) for key, value in (document["envs"] | document["secrets"]).items()}
    return subprocess.run(
        ["bash", "-c", script], cwd=checkout, env=stage.environment(**{**environment, **SKY, **changes}), check=False,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_skypilot_on_several_nodes(stage: Stage, tmp_path: Path) -> None:
    done = run_task(stage, "multi_node", at=tmp_path, TRAIN="--config examples/hunyuan_video/grpo_16gpu.toml --seed 3")
    assert done.returncode == 0, done.stderr
    argv = stage.call(rank=1)["argv"]
    places = ("num_processes", "num_machines", "machine_rank", "main_process_ip")
    assert [option(argv, name) for name in places] == ["16", "2", "1", "10.0.0.5"]
    config = training(argv)
    assert config.run.output_dir == tmp_path / "shared" / "runs" / "first"
    assert (config.training.seed, config.training.resume_from_checkpoint) == (3, "auto")
    stopped = run_task(stage, "multi_node", at=tmp_path, STUB_RESULT="stopped", SKYPILOT_NODE_RANK="0")
    assert stopped.returncode == 75


def test_skypilot_brings_the_run_back_from_the_bucket(stage: Stage, tmp_path: Path) -> None:
    saved = tmp_path / "bucket" / "first" / "checkpoints" / "step-5"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text("{}")
    done = run_task(stage, "single_node", at=tmp_path, STUB_RESULT="stopped")
    assert done.returncode == 75, done.stderr
    argv = stage.call()["argv"]
    assert option(argv, "num_processes") == "8"
    assert "--num_machines" not in argv
    config = training(argv)
    output = tmp_path / "runs" / "first"
    assert config.run.output_dir == output
    assert config.data.data_root == Path("/clips")
    assert (output / "checkpoints" / "step-5" / "manifest.json").read_text() == "{}"
    # What the run wrote last is in the bucket when the job ends.
    assert '"stopped"' in (tmp_path / "bucket" / "first" / "events.jsonl").read_text()


def test_mirror_copies_whole_checkpoints_and_prunes_after_them(stage: Stage, tmp_path: Path) -> None:
    mirror = CLUSTER / "mirror.sh"
    run, bucket = tmp_path / "run", tmp_path / "bucket"
    for name, step in (("step-1", 1), ("step-2", 2), (".step-3.tmp", 3)):
        (run / "checkpoints" / name / "transformer").mkdir(parents=True)
        (run / "checkpoints" / name / "transformer" / "weights").write_text(f"weights {step}")
        (run / "checkpoints" / name / "manifest.json").write_text(f"manifest {step}")
    (run / "events.jsonl").write_text("one\n")
    (run / "precomputed").mkdir()
    (run / "control").mkdir()
    cut_off, pruned = bucket / "checkpoints" / "step-2", bucket / "checkpoints" / "step-0"
    for folder in (cut_off, pruned):
        folder.mkdir(parents=True)
    (cut_off / "half").write_text("of it")
    process = subprocess.Popen(["bash", str(mirror), "follow", str(run), str(bucket)])
    deadline = time.monotonic() + 20
    while pruned.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    (run / "events.jsonl").write_text("one\ntwo\n")
    os.utime(run / "events.jsonl", (time.time() + 5, time.time() + 5))
    process.terminate()
    assert process.wait(timeout=20) == 0
    assert sorted(path.name for path in (bucket / "checkpoints").iterdir()) == ["step-1", "step-2"]
    assert sorted(path.name for path in cut_off.iterdir()) == ["manifest.json", "transformer"]
    assert (cut_off / "transformer" / "weights").read_text() == "weights 2"
    assert sorted(path.name for path in bucket.iterdir()) == ["checkpoints", "events.jsonl"]
    assert (bucket / "events.jsonl").read_text() == "one\ntwo\n"

    # A copy that was cut off is not brought back.
    (cut_off / "manifest.json").unlink()
    done = stage.run("bash", mirror, "restore", bucket, tmp_path / "again")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "again" / "checkpoints").iterdir()] == ["step-1"]
    assert stage.run("bash", mirror, "restore", tmp_path / "nothing", tmp_path / "new").returncode == 0
    assert not (tmp_path / "new").exists()


def test_a_mirror_that_is_ended_while_it_copies_does_not_wait_for_its_next_round(stage: Stage, tmp_path: Path) -> None:
    (stage.folder / "bin" / "cp").write_text(f'#!/bin/bash\nkill -TERM "$PPID"\nexec {shutil.which("cp")} "$@"\n')
    (stage.folder / "bin" / "cp").chmod(0o755)
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run" / "events.jsonl").write_text("one\n")
    done = stage.run(
        "bash", CLUSTER / "mirror.sh", "follow", tmp_path / "a run", tmp_path / "copy", MIRROR_SECONDS="600"
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "copy" / "events.jsonl").read_text() == "one\n"


# ---- Docker ---------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    text = (CLUSTER / "docker" / "Dockerfile").read_text(encoding="ascii")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in joined) if word]


def test_dockerfile_builds_from_what_is_here() -> None:
    found = instructions()
    words = [word for word, _ in found]
    assert set(words) <= {"ARG", "FROM", "RUN", "USER", "WORKDIR", "ENV", "COPY", "VOLUME", "ENTRYPOINT"}
    assert next(word for word in words if word != "ARG") == "FROM"
    copied: set[str] = set()
    for word, rest in found:
        if word == "COPY":
            sources = [part for part in rest.split() if not part.startswith("--")][:-1]
            assert all((ROOT / source).exists() for source in sources)
            copied |= set(sources)
    ignored = (CLUSTER / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied, "the build sees what it copies, no more"
    assert {"train.py", "examples", "accelerate_configs", "finetrainers", "requirements.txt"} <= copied
    assert f"RUN {install_command()}" in [f"{w} {r}".replace(" --no-cache-dir", "") for w, r in found]
    # All that writes at run time belongs to the user that runs, and the entry point is there.
    assert dict(found)["USER"] == "trainer"
    assert words.index("USER") < words.index("COPY")
    assert json.loads(dict(found)["ENTRYPOINT"]) == ["bash", NODE.relative_to(ROOT).as_posix()]
    assert json.loads(dict(found)["VOLUME"]) == ["/runs", "/data", "/cache"]
    assert (ROOT / "requirements.txt").read_text().startswith("torch==")


# ---- all hosts ------------------------------------------------------------------------------------------------------


def test_hosts_are_looked_at_together(stage: Stage) -> None:
    hosts = stage.folder / "nodes.txt"
    hosts.write_text("# the rack on the left\ngpu-03\ndead\n\ngpu-07 slots=8\n")
    done = stage.run("bash", CLUSTER / "hosts.sh", "gpus", HOSTS=str(hosts))
    assert done.returncode == 1, "a host that does not answer shows in the exit code"
    lines = done.stdout.splitlines()
    assert sum(line.startswith("gpu-03: said by nvidia-smi") for line in lines) == 1
    assert sum(line.startswith("gpu-07: process said by nvidia-smi") for line in lines) == 1
    assert "dead: connection timed out" in lines
    for arguments, changes in ((["processes"], {"HOSTS": str(hosts)}), (["gpus"], {}), ([], {"HOSTS": str(hosts)})):
        done = stage.run("bash", CLUSTER / "hosts.sh", *arguments, **changes)
        assert (done.returncode, done.stderr[:5]) == (2, "usage")


def test_only_processes_of_the_run_are_ended(stage: Stage) -> None:
    hosts = stage.folder / "nodes.txt"
    hosts.write_text("gpu-03\n")
    mine, other = (
        subprocess.Popen(["sleep", "60"], env={**os.environ, "FINETRAINERS_RUN": run})
        for run in (str(stage.run_dir), f"{stage.run_dir}-2")
    )
    try:
        shown = stage.run("bash", CLUSTER / "hosts.sh", "processes", stage.run_dir, HOSTS=str(hosts)).stdout
        assert re.findall(r"^gpu-03: +(\d+) .*sleep 60$", shown, re.MULTILINE) == [str(mine.pid)]
        killed = stage.run("bash", CLUSTER / "hosts.sh", "kill", stage.run_dir, HOSTS=str(hosts)).stdout
        assert killed == f"gpu-03: killed {mine.pid}\n"
        assert mine.wait(timeout=10) == -signal.SIGKILL
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()


def test_hosts_of_a_job_are_asked_over_srun(stage: Stage) -> None:
    done = stage.run("bash", CLUSTER / "hosts.sh", "gpus", JOB="77", SLURM_JOB_NUM_NODES="2")
    assert done.stdout.count("process said by nvidia-smi") == 2
    options = json.loads((stage.folder / "srun.json").read_text())
    assert {"--jobid=77", "--overlap", "--ntasks-per-node=1"} <= set(options)
