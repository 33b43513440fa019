"""Sessions and decoder on the oldest transformers that `pyproject.toml` admits; fetches it, so not in `make test`."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


@pytest.mark.large
def test_the_oldest_transformers(tmp_path):
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = next(r for r in map(Requirement, listed) if r.name == "transformers")
    oldest = next(s.version for s in wanted.specifier if s.operator == ">=")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path), f"transformers=={oldest}"]
    # torch and numpy stay those of this environment
    subprocess.run([*pip, "--no-deps", "huggingface_hub<1", "tokenizers<0.23"], check=True)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    version = [sys.executable, "-c", "import transformers; print(transformers.__version__)"]
    assert subprocess.check_output(version, env=environment, text=True).strip() == oldest
    files = [f"tests/test_{name}.py" for name in ("session", "fast", "drafters", "decode", "support")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
