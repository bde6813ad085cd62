"""Hugging Face ids: from the cache without a network, from a server, and each refusal.

The hub is a server on this machine, which answers as huggingface.co does.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

from mrv1 import LLM, ConfigError, EngineConfig, SamplingParams
from mrv1.config import checkpoint_dir
from mrv1.hub import is_hub_id, snapshot_dir
from mrv1.runner import ModelRunner

TINY = checkpoint_dir("tiny")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLD_COMMIT = "f" * 40
ERRORS = {"missing": (404, "RepoNotFound"), "gated": (403, "GatedRepo"), "broken": (500, "")}
"""Name of a model -> status and error code of the server's answer."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.fixture
def cached(cache: Path) -> Path:
    """The snapshot of ``org/tiny`` in the cache; branch ``old`` is another commit."""
    model = cache / "models--org--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    (model / "refs" / "old").write_text(OLD_COMMIT)
    for commit in (COMMIT, OLD_COMMIT):
        shutil.copytree(TINY, model / "snapshots" / commit)
    return model / "snapshots" / COMMIT


class _Hub(BaseHTTPRequestHandler):
    """Answers for the one model ``org/tiny``, whose files are in ``files``."""

    files: dict[str, bytes]
    requests: list[str]

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: object) -> None:
        """Write nothing to stderr."""

    def _answer(self, *, with_body: bool) -> None:
        path = urlsplit(self.path).path
        self.requests.append(f"{self.command} {path}")
        headers, body = {}, b""
        name = next((name for name in ERRORS if f"/{name}" in path), None)
        if name is not None:
            status, code = ERRORS[name]
            headers["X-Error-Code"] = code
        elif path == "/api/models/org/tiny/revision/main":
            status, body = 200, json.dumps({"id": "org/tiny", "sha": COMMIT}).encode()
        elif path.startswith("/api/models/org/tiny/tree/"):
            status, body = 200, json.dumps([_entry(n, b) for n, b in self.files.items()]).encode()
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            status, body = 200, self.files[path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")]
            headers |= {"ETag": f'"{_etag(body)}"', "X-Repo-Commit": COMMIT}
        else:
            status, headers["X-Error-Code"] = 404, "RevisionNotFound"
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _etag(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


def _entry(name: str, body: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(body), "oid": _etag(body)}


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Hub]]:
    """A server on this machine in the place of huggingface.co."""
    files = {path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file()}
    files["additional_chat_templates/rag.jinja"] = b"{{ messages }}"
    files["pytorch_model.bin"] = files["consolidated.safetensors"] = b"a second copy"
    handler = type("Hub", (_Hub,), {"files": files, "requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.close_session()
    yield handler
    huggingface_hub.close_session()
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    shutil.copytree(TINY, tmp_path / "models" / "mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoint_dir("~/models/mine") == tmp_path / "models" / "mine"
    with pytest.raises(ConfigError, match=r"expected a checkpoint directory.* got '~/none'$"):
        checkpoint_dir("~/none")
    with pytest.raises(ConfigError, match="expected a readable directory, got '~no-such-user/x'"):
        checkpoint_dir("~no-such-user/x")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/name", True),
        ("Qwen/Qwen2.5-0.5B_x", True),
        ("org/name@v1.0", True),
        ("org/name@refs/pr/1", True),
        ("name", False),
        ("./org/name", False),
        ("../name", False),
        ("~/name", False),
        ("/org/name", False),
        ("org/name/file", False),
        ("org/name@", False),
        ("org/na me", False),
    ],
)
def test_the_form_of_an_id(model, expected):
    assert is_hub_id(model) is expected


def test_a_cached_model_needs_no_network(cached):
    assert checkpoint_dir("org/tiny") == cached
    assert checkpoint_dir("org/tiny@old") == cached.parent / OLD_COMMIT
    assert checkpoint_dir(f"org/tiny@{OLD_COMMIT}") == cached.parent / OLD_COMMIT
    params = SamplingParams(temperature=0, max_tokens=8)
    texts = []
    for model in ("org/tiny", "tiny"):
        with LLM(model, device="cpu", max_num_seqs=2, num_kv_blocks=16) as llm:
            texts.append(llm.generate("ROMEO:", params)[0].outputs[0].text)
    assert texts[0] == texts[1]


def test_a_runner_resolves_an_id_once(cached):
    config = EngineConfig(model="org/tiny", device="cpu", max_num_seqs=2, num_kv_blocks=8)
    runner = ModelRunner(config, progress=False)
    assert runner.config.model == str(cached)
    runner.close()


def test_a_directory_has_precedence_over_an_id(cached, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY, tmp_path / "org" / "tiny")
    assert checkpoint_dir("org/tiny") == Path("org/tiny")


@pytest.mark.parametrize(
    ("model", "command"),
    [
        ("org/none", "`hf download org/none`"),
        ("org/tiny@new", "`hf download org/tiny --revision new`"),
    ],
)
def test_offline_without_a_cached_model_names_the_command(cached, model, command):
    _check_refused(model, f"HF_HUB_OFFLINE=1.*{model!r}.*{command} with a network")


def test_a_cached_model_without_a_configuration_is_refused(cached):
    (cached / "config.json").unlink()
    _check_refused("org/tiny", "expected a config.json in .*models--org--tiny")


def test_a_model_is_downloaded_once(hub, cache, monkeypatch):
    directory = checkpoint_dir("org/tiny")
    assert directory == cache / "models--org--tiny" / "snapshots" / COMMIT
    names = {path.name for path in directory.iterdir() if path.is_file()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not names & {"pytorch_model.bin", "consolidated.safetensors"}
    assert (directory / "additional_chat_templates" / "rag.jinja").is_file()
    for name in names:
        assert (directory / name).read_bytes() == (TINY / name).read_bytes()
    num_requests = len(hub.requests)
    assert checkpoint_dir("org/tiny") == directory
    assert not [request for request in hub.requests[num_requests:] if "resolve" in request]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert checkpoint_dir("org/tiny") == directory


@pytest.mark.parametrize("progress", [True, False])
def test_a_download_shows_its_progress_unless_it_is_off(hub, capfd, monkeypatch, progress):
    monkeypatch.setenv("TQDM_POSITION", "-1")  # as on a terminal
    checkpoint_dir("org/tiny", progress=progress)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert ("%" in captured.err) == progress
    assert progress or not captured.err


def test_an_interrupted_download_is_incomplete(hub, cache, monkeypatch):
    (checkpoint_dir("org/tiny") / "model.safetensors").unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    _check_refused("org/tiny", "a complete model in .*`hf download org/tiny`")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/missing", "got 'org/missing', which is neither; a private model needs HF_TOKEN"),
        ("org/gated", "the gated model 'org/gated', got none; .*/org/gated, then set HF_TOKEN"),
        ("org/tiny@none", "commit of 'org/tiny' after the '@', got 'none'"),
        ("org/a--b", "expected 'org/a--b' to be downloaded, got HFValidationError"),
    ],
)
def test_the_hubs_refusals(hub, model, message):
    _check_refused(model, message)


def test_a_hub_that_cannot_be_reached(hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    _check_refused("org/tiny", "a connection to http://127.0.0.1:1, .*ConnectError.*`hf download")


def test_another_form_is_refused():
    _check_refused("org", "expected org/name or org/name@revision, got 'org'", snapshot_dir)


def _check_refused(
    model: str, message: str, load: Callable[[str], object] = checkpoint_dir
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(model)
    assert str(caught.value).startswith("model: expected ")
    assert "\n" not in str(caught.value)
