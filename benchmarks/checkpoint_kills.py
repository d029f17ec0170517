"""Kill a process at random moments while it saves, and count how often the newest checkpoint can be loaded.

    python benchmarks/checkpoint_kills.py --kills 25
    python benchmarks/checkpoint_kills.py --background
    python benchmarks/checkpoint_kills.py --kills 25 --command

Each round forks a process that trains and saves in a loop, some steps twice, with room for two checkpoints, and kills
it with SIGKILL. Then the newest checkpoint is verified byte by byte, loaded into a new state, and compared with what
training to that step gives. With `--background` a thread writes while training goes on. `--in_place` is the control:
the same files written straight to their final name.

`--command` kills the training command itself, on a tiny model, while it saves, and continues it each time with
`--resume_from_checkpoint latest`; after the last kill it runs to its end, and the weights that it hands out are
compared with those of a run that nobody killed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from finetrainers.cli.main import main as main_command
from finetrainers.config.load import load_config
from finetrainers.optim.factory import create_optimizer
from finetrainers.plan.initial_weights import LORA_FILE
from finetrainers.rundir.find import checkpoints_dir, find_checkpoint, scan_checkpoints, step_of
from finetrainers.rundir.run_dir import RunDirectory
from finetrainers.training.checkpoints import save as saving
from finetrainers.training.checkpoints.async_save import BackgroundSave
from finetrainers.training.checkpoints.restore import load_checkpoint
from finetrainers.training.staging import Staging
from finetrainers.training.watchdog import Watchdog
from finetrainers.utils.hashed_files import Written, save_safetensors

WIDTH = 256


class OneProcess:
    """The part of `Strategy` that saving uses, for one process."""

    is_main, saves_optimizer_itself, scaler, optimizer_layout = True, False, None, "one process"
    weights_are_whole = True

    def full_state(self, model: nn.Module, *, wanted: Any = None) -> dict[str, torch.Tensor]:
        return model.state_dict()

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def load_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)

    def save_own_files(self, directory: Path) -> None:
        pass

    def load_own_files(self, directory: Path) -> None:
        pass

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def max_on_host(self, values: list[int]) -> list[int]:
        return values

    def raise_on_all_ranks(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def raise_if_any_failed(self, error: Exception | None, what: str) -> None:
        if error is not None:
            raise error


class Network(nn.Sequential):
    """Two layers, half a MB; with Adam's moments a checkpoint has 1.5 MB."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class Spec:
    """Writes the network."""

    facts = SimpleNamespace(trained="transformer")

    def save_full(
        self, directory: Path, transformer: nn.Module, state_dict: dict[str, torch.Tensor], files: Any = None
    ) -> dict[Path, Written]:
        (directory / "transformer").mkdir()
        path = directory / "transformer" / "diffusion_pytorch_model.safetensors"
        return {path: save_safetensors(state_dict, path)}


def make_state(root: Path, *, background: bool = False, network: nn.Module | None = None) -> Any:
    """What `save_checkpoint` and `load_checkpoint` read of a `TrainState`, at step 0."""
    torch.manual_seed(0)
    network = network or Network()
    parallel: Any = OneProcess()
    config = load_config(
        model_name="m", pretrained_model_name_or_path="x", data_root="d", training_type="full-finetune",
        checkpointing_limit=2, async_checkpointing=background, optimizer="adamw", lr=1e-2,
    )  # fmt: skip
    return SimpleNamespace(
        parallel=parallel,
        config=config,
        spec=Spec(),
        method=SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None),
        transformer=network,
        network=network,
        optimizer=create_optimizer(network.parameters(), config=config.optimizer, lr=1e-2, device_type="cpu"),
        ema=None,
        step=0,
        total_steps=10**6,
        checkpoint_fields={"critical": {"data": "none"}},
        data_ahead=0,
        guards=SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None),
        run_dir=RunDirectory(root, writes=True),
        requests=SimpleNamespace(stop=None),
        staging=Staging(),
        shares_saving=False,
    )  # fmt: skip


def make_background(root: Path) -> BackgroundSave:
    """Saves in a thread, of one process."""
    return BackgroundSave(
        parallel=OneProcess(),  # type: ignore[arg-type]
        watchdog=Watchdog(root, rank=0, limits={"checkpoint": None}),
    )


def train_to(state: Any, step: int) -> None:
    """Optimizer steps whose input depends on the step alone."""
    while state.step < step:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(state.step))
        state.transformer(x).square().mean().backward()
        state.staging.wait()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1


def save_for_ever(root: Path, *, background: bool) -> None:
    """Train and save without end; every third step is saved twice, as after going back."""
    state, saves = make_state(root, background=background), make_background(root)
    newest = find_checkpoint("latest", root) if scan_checkpoints(root) else None
    if newest is not None:
        restore(state, newest)
    while True:
        train_to(state, state.step + 1)
        saves.poll(saves.is_writing)
        saving.save_checkpoint(state, saves)
        if state.step % 3 == 0:
            saving.save_checkpoint(state, saves)


def restore(state: Any, directory: Path) -> None:
    state.transformer.load_state_dict(load_file(directory / "transformer" / "diffusion_pytorch_model.safetensors"))
    load_checkpoint(state, directory)


def write_in_place() -> None:
    """The control: files appear under the final name at once, and older checkpoints go before."""

    def reserve(final: Path, *, needed: int) -> Path:
        for older in checkpoints_dir(final.parents[1]).glob("step-*"):
            if int(older.name.removeprefix("step-")) < int(final.name.removeprefix("step-")) - 1:
                shutil.rmtree(older)
        shutil.rmtree(final, ignore_errors=True)
        final.mkdir(parents=True)
        final.with_name(f".{final.name}.tmp").symlink_to(final.name)
        return final

    def seal(temporary: Path, final: Path, *, facts: Any, written: Any) -> None:
        temporary.unlink()

    saving.reserve, saving.publish = reserve, seal
    saving.prune = lambda *_, **__: []


def newest_is_good(root: Path, reference: Any, *, verify: bool) -> bool:
    """Whether the newest checkpoint, by name, is whole and is what training to its step gives, bit for bit."""
    newest = max(
        (p for p in checkpoints_dir(root).iterdir() if step_of(p) is not None),  # one that was being replaced counts
        key=lambda p: (step_of(p), not p.name.startswith(".")),
        default=None,
    )
    if newest is None or (verify and find_checkpoint("latest", root) != newest):
        return False
    loaded = make_state(root)
    restore(loaded, newest)
    train_to(reference, loaded.step)
    ours, theirs = loaded.optimizer.state_dict()["state"], reference.optimizer.state_dict()["state"]
    same = [torch.equal(ours[i][name], theirs[i][name]) for i in theirs for name in theirs[i]]
    weights = zip(loaded.transformer.parameters(), reference.transformer.parameters(), strict=True)
    return loaded.step == reference.step and all(same) and all(torch.equal(a, b) for a, b in weights)


def kill_once(root: Path, *, delay: float, background: bool) -> None:
    """Fork a process that saves for ever, and kill it `delay` seconds after its first checkpoint."""
    before = len((root / "events.jsonl").read_text().splitlines()) if (root / "events.jsonl").is_file() else 0
    child = os.fork()
    if child == 0:
        save_for_ever(root, background=background)
    deadline = time.monotonic() + 60
    while not (root / "events.jsonl").is_file() or len((root / "events.jsonl").read_text().splitlines()) <= before:
        assert time.monotonic() < deadline, "the process saves nothing"
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the process has ended by itself"
        time.sleep(0.005)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def run_kills(root: Path, *, kills: int, seed: int, in_place: bool, background: bool) -> tuple[int, int]:
    """How many of the kills left a good newest checkpoint, and how many hit a save (left something half-done)."""
    if in_place:
        write_in_place()
    draw = random.Random(seed)
    good = hit = 0
    reference = make_state(root)
    for _ in range(kills):
        if in_place:  # else the next process would start from a damaged one
            shutil.rmtree(root, ignore_errors=True)
            reference = make_state(root)
        kill_once(root, delay=draw.uniform(0, 0.1), background=background)
        hit += any(checkpoints_dir(root).glob(".step-*"))
        try:
            good += newest_is_good(root, reference, verify=not in_place)
        except (OSError, ValueError, KeyError, EOFError, RuntimeError, SafetensorError):
            if not in_place:
                raise
    return good, hit


# ---- the command itself --------------------------------------------------------------------------------------------


def fork_command(log: Path, *words: str) -> int:
    """Fork a process that runs `finetrainers WORDS`; its number."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # a new pool, before threads of the loading code ask for it at once
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = 1
        try:
            code = main_command(words)
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return child


def run_command(log: Path, *words: str) -> None:
    """The same, to its end."""
    _, status = os.waitpid(fork_command(log, *words), 0)
    if status != 0:
        raise RuntimeError(f"finetrainers {words[0]} failed\n{log.read_text()[-4000:]}")


def kill_while_saving(child: int, checkpoints: Path, draw: random.Random) -> bool:
    """Kill a training process while, or right after, it writes a checkpoint; whether it had not ended before."""
    saves = draw.randint(1, 2)
    seen: set[str] = set()
    while len(seen) < saves:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return False
        if checkpoints.is_dir():
            seen |= {path.name for path in checkpoints.glob(".step-*[0-9].tmp")}
        time.sleep(0.0005)
    time.sleep(draw.uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def kill_commands(root: Path, *, kills: int, seed: int) -> tuple[int, int, bool]:
    """Kills that left a newest checkpoint that verifies, kills that hit a save, and whether the run ended as an
    undisturbed one."""
    import_module("finetrainers.runs.run")  # here, so that not every fork has to
    log, draw = root / "log", random.Random(seed)
    run_command(log, "tiny", "ltx_video", str(root / "model"))
    run_command(log, "demo", "data", str(root / "clips"), "--items", "2")

    def train(name: str) -> list[str]:
        return [
            "train", "--model_name", "ltx_video", "--pretrained_model_name_or_path", str(root / "model"),
            "--data_root", str(root / "clips"), "--dataset_file", str(root / "clips" / "captions.jsonl"),
            "--video_column", "video", "--caption_column", "text", "--video_resolution_buckets", "9x32x32",
            "--output_dir", str(root / name), "--train_steps", str(2 * kills + 2), "--checkpointing_steps", "1",
            "--checkpointing_limit", "2", "--lr", "1e-3", "--rank", "4", "--lora_dropout", "0.3", "--use_ema",
        ]  # fmt: skip

    run_command(log, *train("undisturbed"))
    good = hit = 0
    checkpoints = checkpoints_dir(root / "killed")
    for _ in range(kills):
        resume = ["--resume_from_checkpoint", "latest"] if scan_checkpoints(root / "killed") else []
        child = fork_command(log, *train("killed"), *resume)
        if not kill_while_saving(child, checkpoints, draw):
            raise RuntimeError(f"the run ended before it was killed\n{log.read_text()[-4000:]}")
        hit += any(checkpoints.glob(".step-*"))
        published = list(checkpoints.glob("step-*"))
        newest = max(published, key=lambda path: int(path.name.removeprefix("step-")), default=None)
        # Before the first is published there is none to be found, and none to be lost.
        good += find_checkpoint("latest", root / "killed") == newest if newest else not resume
    resume = ["--resume_from_checkpoint", "latest"] if scan_checkpoints(root / "killed") else []
    run_command(log, *train("killed"), *resume)
    ours, theirs = (load_file(root / name / LORA_FILE) for name in ("killed", "undisturbed"))
    return good, hit, ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--in_place", action="store_true", help="the control: write to the final name")
    kinds.add_argument("--background", action="store_true", help="save with --async_checkpointing")
    parser.add_argument("--directory", type=Path, default=None, help="where to save [a temporary one]")
    parser.add_argument("--command", action="store_true", help="kill the training command itself, and let it end")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.command:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            good, hit, same = kill_commands(Path(directory), kills=arguments.kills, seed=arguments.seed)
        print(
            f"the command: {good} of {arguments.kills} kills left a good newest checkpoint; {hit} kills hit a save; "
            f"continued to its end, the run is {'the same bit for bit' if same else 'DIFFERENT'}"
        )
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        good, hit = run_kills(
            Path(directory) / "run",
            kills=arguments.kills,
            seed=arguments.seed,
            in_place=arguments.in_place,
            background=arguments.background,
        )
    kind = "in place" if arguments.in_place else "published by renaming"
    if arguments.background:
        kind += " in the background"
    print(f"{kind}: {good} of {arguments.kills} kills left a good newest checkpoint; {hit} kills hit a save")


if __name__ == "__main__":
    main()
