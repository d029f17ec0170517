"""A pretrained model: its configs, its components, loaded one by one, and the weights that training writes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast
from weakref import WeakValueDictionary

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from finetrainers.config.attention import AUTO
from finetrainers.config.errors import Problem
from finetrainers.config.facts import Configs, Facts, Read, is_network
from finetrainers.config.sections import ModelSection
from finetrainers.utils.hashed_files import Written

from . import common
from .batch import ModelComponents
from .files import saving
from .files.files import MODEL_INDEX, part_folder, read_configs, single_file
from .files.lora_formats import Lora
from .files.original import ORIGINALS, Original
from .files.weights import network_problems
from .split.attention import AttentionFn, set_processors


class PretrainedModel(ABC):
    """Files of one pretrained model, as `ModelSpec` uses them. Loads its components; holds no training state.

    Loading happens in three phases (text encoders, VAE, transformer), so that they never have to share memory.

    Attributes:
        config: names the checkpoint.
        name: name of the family.
        facts: facts read from the checkpoint's configs.
        configs: the configs themselves, by part.
        store_expert: stores the weights of the other expert, once it is loaded, as a run stores those of the trained
            network, or None to leave them as they are.
    """

    #: Class of each tokenizer and network, by the part of a repository that holds it, in loading order.
    parts: ClassVar[Mapping[str, Any]] = {}
    #: The diffusers pipeline that users load the results with.
    pipeline_class: Any = None
    #: Class of the processor that runs the blocks' attention by a chosen backend, or None, so that `--attn_backend` and
    #: `--sp_size` are refused.
    attention_processor: type[Any] | None = None
    #: Names of modules, all of whose weights are `Facts.unused`, which return states of the shape of their input: they
    #: are left out of networks that are not written as a whole.
    unused_layers: ClassVar[Sequence[str]] = ()

    def __init__(self, config: ModelSection, *, name: str, read: Read) -> None:
        self.config = config
        self.name = name
        self._read = read
        self.network: nn.Module | None = None  # trained in a copy, instead of the checkpoint's
        self.store_expert: Callable[[nn.Module], None] | None = None
        self._in_use: WeakValueDictionary[str, Any] = WeakValueDictionary()  # parts that are loaded, by name

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, such as a decoding worker, without the loaded parts."""
        return {**vars(self), "_in_use": {}, "network": None, "store_expert": None}

    @cached_property
    def configs(self) -> Configs:
        """The checkpoint's configs by part; missing ones of diffusers' networks are downloaded."""
        known = (MODEL_INDEX, "scheduler", *self.parts)
        configs = {n: c for n, c in read_configs(self.config, ("scheduler", *self.parts)).items() if n in known}
        for part, cls in reversed([*self.parts.items()]):
            if part not in configs and part in self._read(configs).parts and issubclass(cls, ModelMixin):
                configs[part] = common.load_part(cls.load_config, self.config, part)
        return configs

    @cached_property
    def facts(self) -> Facts:
        """Facts about the checkpoint, read from its configs; ValueError if the family does not train its kind."""
        return self._read(self.configs).of_expert(self.config.expert)

    @property
    def single_file_layout(self) -> Original | None:
        """Layout of the trained network by its authors, or None, so that full weights in `comfyui` are refused."""
        return ORIGINALS.get(self.parts[self.facts.trained].__name__)

    def examine(self) -> tuple[list[Problem], list[str]]:
        """Compare the headers of weight files on this disk with the networks' classes; return problems and warnings."""
        return network_problems(self.config, {n: self.parts[n] for n in self.facts.parts if is_network(n)})

    def files_of(self, part: str) -> list[Path]:
        """Return the files on this disk that a part would be loaded from."""
        folder, single = part_folder(self.config, part), single_file(self.config, part)
        return [*(sorted(folder.iterdir()) if folder else ()), *([single] if single else ())]

    # ---- loading -----------------------------------------------------------------------------------------------

    @abstractmethod
    def block_modules(self, network: nn.Module) -> list[nn.Module]:
        """Return the transformer's repeated blocks, whose attention has the chosen backend."""

    def load_text_encoders(self) -> ModelComponents:
        """Load tokenizers and text encoders, on the CPU, in eval mode, in the configured dtypes."""
        return common.load_frozen(self.parts, self.config, self.facts.text_parts)

    def load_vae(self) -> nn.Module:
        """Load the VAE, on the CPU, in eval mode, in `vae_dtype`, with the configured slicing and tiling."""
        vae = common.load_frozen(self.parts, self.config, ["vae"])["vae"]
        if self.config.enable_slicing:
            vae.enable_slicing()
        if self.config.enable_tiling:
            vae.enable_tiling()
        return vae

    def load_clip_encoders(self) -> ModelComponents:
        """Load the VAE and the family's other `clip_parts`, for `encode_clip`, on the CPU, in eval mode."""
        others = self._load_shared([part for part in self.facts.clip_parts if part != "vae"])
        return ModelComponents({"vae": self.load_vae(), **others})

    def _load_shared(self, parts: Sequence[str]) -> dict[str, Any]:
        """Load frozen parts, or return those that are still in use elsewhere, for encoding clips or for sampling."""
        missing = [part for part in parts if part not in self._in_use]
        modules = {part: self._in_use[part] for part in parts if part not in missing}
        modules |= common.load_frozen(self.parts, self.config, missing).modules
        self._in_use.update(modules)
        return modules

    def load_transformer(self, dtype: torch.dtype, *, folder: Path | None = None) -> nn.Module:
        """Load the network that is trained, on the CPU, in `dtype`.

        Args:
            dtype: dtype of its weights.
            folder: folder that it is read from instead of the checkpoint, such as the results of a run.

        Raises:
            ValueError: the checkpoint is of a kind that the family does not train.
        """
        part = self.facts.trained
        if self.network is not None and folder is None:
            network = common.copy_network(self.network, dtype)
        else:
            cls = self.parts[part] if self.network is None else type(self.network)
            network = common.load_network(cls, self.config, part, {"torch_dtype": dtype}, folder=folder)
        common.mark_unused(network, self.facts.unused, self.unused_layers)
        return self._with_attention(network)

    def load_scheduler(self) -> Any:
        """Load the checkpoint's own scheduler."""
        return common.load_scheduler(self.config)

    def transformer_on_meta(self) -> nn.Module:
        """Build the network that is trained on the meta device, without weights, for dry runs."""
        if self.network is None:
            network = common.on_meta(self.parts[self.facts.trained], self.config, self.facts.trained)
        else:
            network = common.copy_network(self.network, device="meta")
        common.mark_unused(network, self.facts.unused, self.unused_layers)
        return network if self.attention_processor is None else self._with_attention(network)

    def experts_on_meta(self) -> dict[str, nn.Module]:
        """Build the experts that are not trained on the meta device, frozen, for dry runs; those with known sizes."""
        parts = (part for part in self.facts.experts if part in self.configs)
        return {part: common.on_meta(self.parts[part], self.config, part).requires_grad_(False) for part in parts}

    def _with_attention(self, network: nn.Module) -> nn.Module:
        """Set the configured attention backend in the network's blocks, and return the network."""
        if self.config.attn_backend != AUTO:
            assert self.attention_processor is not None, "refused by `plan.capabilities`"
            set_processors(self.block_modules(network), self.attention_processor(AttentionFn(self.config.attn_backend)))
        return network

    @cached_property
    def companions(self) -> ModelComponents:
        """Frozen parts that sampling needs, such as another expert; loaded at the first sample, then on the CPU."""
        modules = self._load_shared(self.facts.companions)
        for name in self.facts.experts:
            self._with_attention(modules[name])
            if self.config.other_expert is not None:
                self.load_lora(modules[name], Path(self.config.other_expert))
                modules[name].requires_grad_(False)
            if self.store_expert is not None:
                self.store_expert(modules[name])
        return ModelComponents(modules)

    @property
    def experts(self) -> ModelComponents:
        """The companions that denoise: the other expert, or none."""
        return ModelComponents({n: self.companions[n] for n in self.facts.experts})

    def network_at(self, quantile: float, trained: nn.Module) -> nn.Module:
        """Return the network that denoises samples at a noise-level quantile: the trained one, or the other expert."""
        return trained if self.facts.trains_at(quantile) else self.experts[self.facts.experts[0]]

    # ---- saving ------------------------------------------------------------------------------------------------

    def save_lora(
        self, directory: Path, state_dict: Mapping[str, Tensor], adapter_metadata: dict[str, Any]
    ) -> dict[Path, Written]:
        """Write `pytorch_lora_weights.safetensors`, with alpha and rank, for `load_lora_weights`; return the file."""
        more = {} if self.facts.version is None else {saving.VERSION_KEY: self.facts.version}
        return saving.save_lora(directory, state_dict, adapter_metadata, part=self.lora_prefix, more=more)

    def lora_of(self, path: Path) -> Lora:
        """Read a LoRA file in a format of `lora_names`, or another that the family's pipeline reads; safetensors only.

        Raises:
            ValueError: the file holds no LoRA of this network, or one with NaN or infinity.
        """
        network = self.transformer_on_meta
        saving.warn_of_version(path, self.facts.version)
        return saving.read_lora(self.pipeline_class, path, network, part=self.lora_prefix, family=self.name)

    def read_lora(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read a LoRA file: adapter weights by PEFT's names, and PEFT's settings; without these, alpha is the rank."""
        lora = self.lora_of(path)
        return lora.state(), dict(lora.settings)

    def load_lora(self, transformer: nn.Module, path: Path) -> None:
        """Load a LoRA file as the adapter `default`; see `read_lora`."""
        (state, metadata), load = self.read_lora(path), cast(Any, transformer).load_lora_adapter
        load(state, adapter_name="default", prefix=None, metadata=metadata or None)

    def merge_lora(self, transformer: nn.Module, path: Path) -> None:
        """Add a LoRA file to the weights for good; see `read_lora`."""
        self.load_lora(transformer, path)
        transformer.fuse_lora()  # type: ignore[operator]
        transformer.unload_lora()  # type: ignore[operator]

    @property
    def lora_prefix(self) -> str:
        """Name of the trained part in LoRA files: the pipeline's loader, if any, knows one name for both experts."""
        return getattr(self.pipeline_class, "transformer_name", self.facts.trained)

    @property
    def _lora_options(self) -> dict[str, bool] | None:
        """Options of the pipeline's LoRA loader, or None if it has none, so that the network itself reads the file."""
        if not hasattr(self.pipeline_class, "transformer_name"):
            return None
        part = self.facts.trained
        return {} if part == self.lora_prefix else {f"load_into_{part}": True}

    def load_into(self, pipeline: Any, path: Path) -> None:
        """Load a LoRA file that `save_lora` wrote into a pipeline, as its users do."""
        part, options, folder = self.facts.trained, self._lora_options, str(path.parent)
        if options is not None:
            pipeline.load_lora_weights(folder, weight_name=path.name, **options)
        else:
            getattr(pipeline, part).load_lora_adapter(folder, prefix=part, weight_name=path.name)

    def load_call(self, location: str, file: str | None = None) -> str:
        """Return the call that loads such a LoRA from a location into a user's pipeline, for the model card.

        Args:
            location: directory or Hub repository.
            file: its file there, or None for that of a run.
        """
        part, options, place = self.facts.trained, self._lora_options, json.dumps(location)
        if options is not None:
            name = "" if file is None else f", weight_name={json.dumps(file)}"
            return f"load_lora_weights({place}{name}{''.join(f', {key}={value}' for key, value in options.items())})"
        return f'{part}.load_lora_adapter({place}, prefix="{part}", weight_name="{file or saving.LORA_FILE}")'

    @property
    def strength_call(self) -> str:
        """Call that sets the strength of the LoRA that `load_call` has loaded."""
        if self._lora_options is not None:
            return "set_adapters(pipe.get_active_adapters(), 1.0)"
        return f"{self.facts.trained}.set_adapters(pipe.{self.facts.trained}.active_adapters(), 1.0)"

    def save_full(
        self,
        directory: Path,
        transformer: nn.Module,
        state_dict: Mapping[str, Tensor],
        files: saving.StateDictSplit | None = None,
    ) -> dict[Path, Written]:
        """Write the network that is trained into a folder named after its part; see `saving.save_full`."""
        return saving.save_full(directory / self.facts.trained, transformer, state_dict, files=files)
