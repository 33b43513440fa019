"""A model with Python code of its own: refused at every door, at once, unless it is asked for."""

import json

import pytest
from tiny import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

import specdec_lib as sd
from specdec_lib.cli import app
from specdec_lib.distill import recipe
from specdec_lib.errors import SpecdecError
from specdec_lib.models import Pair, load_model, load_tokenizer, load_transformers


@pytest.fixture
def own_code(tmp_path):
    """A folder with code of its own, which leaves a file where it runs."""
    folder, ran = tmp_path / "own", tmp_path / "ran"
    inner = tiny_model("llama", tiny_tokenizer("llama"), 0, {})
    inner.save_pretrained(folder)
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_code", "auto_map": names, "architectures": ["OwnForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_own.py").write_text(
        f"from transformers import LlamaConfig\nopen({str(ran)!r}, 'w').close()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_code'\n"
    )
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_own import OwnConfig\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    token = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(token))
    return folder, ran, inner


def unasked(*_):
    pytest.fail("a question on the terminal")


def test_code_of_its_own_is_refused_at_once_and_runs_when_asked_for(own_code, monkeypatch, tmp_path):
    folder, ran, inner = own_code
    monkeypatch.setattr("builtins.input", unasked)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    for load in (load_transformers, load_model, load_tokenizer, sd.load_pair, lambda name: recipe.prepare(job(name))):
        with pytest.raises(SpecdecError, match=r"Python code of its own.*trust_remote_code=True .*--trust-remote-code"):
            load(folder)
    with pytest.raises(SpecdecError, match="Python code of its own"):
        sd.load_pair("packaged", str(folder))
    assert not ran.exists()
    model = load_model(folder, "cpu", trust_remote_code=True)
    assert ran.exists() and type(model).__name__ == "OwnForCausalLM"
    assert (
        sd.generate_plain(Pair(model), [5, 9, 3], max_new_tokens=6).tokens
        == sd.generate_plain(Pair(inner), [5, 9, 3], max_new_tokens=6).tokens
    )


def job(target):
    return recipe.Job(out=f"{target}-draft", target=str(target))


@pytest.mark.parametrize(
    "door",
    [
        ["try", "hi"],
        ["bench", "--quick", "--draft", "lookup"],
        ["audit"],
        ["audit", "--engine", "transformers"],
        ["distill", "x"],
    ],
    ids=" ".join,
)
def test_every_door_of_the_shell_refuses_and_names_its_option(door, own_code, monkeypatch, tmp_path):
    folder, ran, _ = own_code
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", unasked)
    result = CliRunner().invoke(app, [*door, "--target", str(folder)])
    assert "--trust-remote-code" in str(result.exception or result.output), result.output
    assert not ran.exists()
    assert "--trust-remote-code" in CliRunner().invoke(app, [door[0], "--help"], env={"COLUMNS": "200"}).output
