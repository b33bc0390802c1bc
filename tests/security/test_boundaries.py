"""Files of others run no code and name no file elsewhere; secrets are in no file of a run."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from megarl.cli import app
from megarl.config import ConfigError, TrainingConfig, load, save
from megarl.config.problems import MASK, without_secrets
from megarl.dashboard.view.page_server import PageServer
from megarl.dashboard.view.run_view import RunView
from megarl.data.tokenizer import load_tokenizer
from megarl.groups.conversations import conversation_failures
from megarl.plan.run_plan import print_plan
from megarl.preflight.check import check
from megarl.run.checkpoints import BrokenCheckpointError, Checkpoints
from megarl.run.directory import RunDirectory
from megarl.run.paths import read_config
from megarl.run.resume import compare_configs
from megarl.types import ConversationOutcome, SampleInfo
from megarl.weights.hf_files import CheckpointError, read_weight_map
from tests.config.debug import DEBUG
from tests.dashboard.status.directories import MadeRun
from tests.dashboard.view.viewed_run import add_lines, viewed_run
from tests.data.rows import chatml_tokenizer
from tests.run.staging import write_roles
from tests.security.hostile import HangError, confined

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"trust_remote_code *= *True|allow_pickle *= *True|weights_only *= *False|yaml\.(unsafe_)?load\(")
PICKLES = re.compile(r"\b(pickle\.(loads?|Unpickler)|torch\.load|np\.load)\b")
READERS = {
    "convert/stored.py": "weights_only=True",
    "conversations/environment_calls.py": '"megarl.conversations.environment_child"',
    "megatron/state.py": "weights_only=True",
    "rewards/child_process.py": "self._launch",
    "rollout/completions.py": "np.load(path) as",
    "rollout/replay.py": "np.load(path) as",
    "types.py": "class Pickled[T]",
    "weights/dcp_metadata.py": "class _MetadataUnpickler(pickle.Unpickler)",
}
"""The files that read pickles or what may hold them, and why nothing in them runs: the unpickler of metadata, and
torch's with weights_only, know the classes of tensors alone, numpy loads no pickle by default, calls
are answered by the run's own child, with the user's code, and `Pickled` moves between the processes of a
run, as what Ray moves."""


def test_no_code_is_loaded_without_a_flag() -> None:
    found: dict[str, str] = {}
    for file in sorted((ROOT / "megarl").rglob("*.py")):
        text = file.read_text()
        assert not CODE.search(text), file
        if PICKLES.search(text):
            found[file.relative_to(ROOT / "megarl").as_posix()] = text
    assert found.keys() == READERS.keys()
    for name, part in READERS.items():
        assert part in found[name], name


EVIL = "from pathlib import Path\nPath('{}').touch()\nclass Evil: pass\n"


@pytest.mark.parametrize("kind", ["TokenizersBackend", "EvilTokenizer"])
def test_the_module_of_a_tokenizer_is_not_run(tmp_path: Path, kind: str) -> None:
    directory, touched = chatml_tokenizer(tmp_path / "model"), tmp_path / "touched"
    (directory / "evil.py").write_text(EVIL.format(touched))
    auto_map = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(
        json.dumps({**settings, "tokenizer_class": kind, "auto_map": auto_map})
    )
    (directory / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    with suppress(ValueError):  # one that transformers knows is loaded, as if there were no module
        load_tokenizer(directory)
    assert not touched.exists()


def test_an_engine_runs_no_code_of_its_model() -> None:
    """It leaves vLLM's setting at its default, which is read without importing vLLM."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    settings = Path(spec.origin).with_name("config") / "model.py"
    assert re.search(r"^    trust_remote_code: bool = False$", settings.read_text(), re.MULTILINE)
    assert "trust_remote_code" not in (ROOT / "megarl/rollout/engine.py").read_text()


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "sub/x", ".."])
def test_an_index_names_files_beside_it_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="of other directories"):
        read_weight_map(tmp_path / "index.json")


@pytest.mark.parametrize("name", ["../../outside", "/dev/zero", "0-0.bin/..", "", "x\n"])
def test_a_manifest_names_files_of_its_checkpoint_alone(tmp_path: Path, name: str) -> None:
    Checkpoints(tmp_path).commit(1, write_roles(tmp_path / ".step-1.staged"), {})
    manifest = tmp_path / "step-1/manifest.json"
    fields = json.loads(manifest.read_text())
    fields["roles"]["actor"][0][0]["path"] = name
    manifest.write_text(json.dumps(fields))
    with pytest.raises(BrokenCheckpointError, match=r"manifest.json cannot be read: "):
        Checkpoints(tmp_path).latest()
    fields["roles"] = {"../../outside": []}
    manifest.write_text(json.dumps(fields))
    with pytest.raises(BrokenCheckpointError, match="is no role"):
        Checkpoints(tmp_path).latest()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_text("outside")
    with PageServer([RunView(tmp_path / "run", "run")]) as running:
        Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield running
        running.shutdown()


@pytest.mark.parametrize("path", ["../secret", "api/../../secret", "%2e%2e/secret", "/etc/passwd", "run/config.yaml"])
def test_the_page_serves_no_file(server: PageServer, path: str) -> None:
    for given, status in ((f"/{server.token}/{path}", 400), (f"/{path}", 403)):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
        connection.request("GET", given)
        response = connection.getresponse()
        assert response.status == status
        assert b"outside" not in response.read()
        connection.close()


BOMB = "".join(
    f"{name}: &{name} [{', '.join([inner] * 9)}]\n"
    for name, inner in zip("abcdefghi", ["x", *(f"*{a}" for a in "abcdefgh")], strict=True)
)
"""A few lines of YAML that stand for 9^9 texts."""
OPENED = (
    *("config.yaml", "metrics.jsonl", "evaluations.jsonl", "attempts.jsonl", "samples.jsonl"),
    "prompt_scores.jsonl",
)


@contextmanager
def soon() -> Iterator[None]:
    """Raises HangError for a block that waits, computes or reads for long, or takes gigabytes."""

    def hang(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, 20)
    try:
        with confined():
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def shown(run: MadeRun) -> Iterator[str]:
    """What the commands print that read a run."""
    page = run.path.with_name("page.html")
    for command in (
        ["status", run.path],
        ["view", run.path, "--export", page],
        ["compare", run.path],
    ):
        with soon():
            result = CliRunner().invoke(app, list(map(str, command)))
        assert result.exception is None or isinstance(result.exception, SystemExit)
        yield result.output


@pytest.mark.parametrize("name", [*OPENED, "summary.json", "trace.json", ".lock"])
def test_pipes_and_devices_in_the_directory_of_a_run_are_not_read(tmp_path: Path, name: str) -> None:
    run = viewed_run(tmp_path / "run")
    file = run.path / name
    file.parent.mkdir(exist_ok=True)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        file.unlink(missing_ok=True)
        make(file)
        texts = list(shown(run))
        if name in OPENED:
            assert f"{name}: it is no regular file" in "".join(texts)


def test_a_configuration_that_expands_without_end_is_no_configuration(tmp_path: Path) -> None:
    run = viewed_run(tmp_path / "run")
    for text in (BOMB, "[" * 100_000, "x" * (2 << 20)):
        (run.path / "config.yaml").write_text(text)
        assert "20 of ?" in next(shown(run))
        list(shown(run))


def test_a_line_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.files._LONGEST_LINE", 1 << 20)
    run = viewed_run(tmp_path / "run")
    for name in ("metrics.jsonl", "samples.jsonl"):
        os.truncate(run.path / name, 1 << 40)
    assert "a line has more than" in "".join(shown(run))


def test_terminal_escapes_of_others_are_shown_and_not_sent(tmp_path: Path) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\u202e\r"
    run = viewed_run(tmp_path / "run")
    run.end(1, ago=5, step=20, reason="run error", message=f"a{evil}b")
    run.start(2, ago=4, host=f"h{evil}")
    run.end(2, ago=3, step=20, reason="run error", message=f"a{evil}b")
    add_lines(run.path / "evaluations.jsonl", [{"step": 20, f"eval/{evil}": 1.0}])
    scores = {"step": 20, "prompt_id": f"held{evil}", "scores": {evil: [1.0]}}
    add_lines(run.path / "prompt_scores.jsonl", [scores, {**scores, "step": 0, "scores": {evil: [0.0]}}])
    texts = [*shown(run), CliRunner().invoke(app, ["status", str(tmp_path / evil)]).output]
    texts += CliRunner().invoke(app, ["status", str(run.path), str(run.path)]).output
    outcome = ConversationOutcome(turns=1, truncated=False, failure=evil, metrics={})
    sizes: dict[str, Any] = {"chunk": 0, "row": 0, "prompt_tokens": 1, "response_tokens": 1}
    failed = SampleInfo(sample_id="a", prompt_id=evil, finished=True, outcome=outcome, **sizes)
    texts += conversation_failures([failed]).values()
    assert sum("\\x1b[2J" in text for text in texts) >= 3
    assert not [text for text in texts if re.search("[\x1b\x07\r\u202e]", text)]


SECRET = "sk-2f9c81d07e"


def judged(completion: object, *, api_key: str, judges: list[Any], field: str) -> float:
    """A reward function with secrets."""
    return 0.0


def judge(*missing: str) -> list[str]:
    """Overrides for a reward function whose arguments have secrets."""
    args = {"api_key": "${oc.env:JUDGE_KEY}", "judges": [{"hf_token": SECRET}], "field": "x"}
    function = {"name": f"{__name__}:judged", "args": {name: args[name] for name in args if name not in missing}}
    return ["groups.train.roles.reward=null", f"reward.functions=[{json.dumps(function)}]"]


def contents(directory: Path) -> Mapping[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_secret_of_the_configuration_is_in_no_file_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    config = load(DEBUG, [f"run.dir={tmp_path / 'run'}", *judge()])
    assert isinstance(config, TrainingConfig)
    sets = check(config)
    directory = RunDirectory(config)
    try:
        with (tmp_path / "run/plan.txt").open("w") as printed:
            print_plan(config, sets, console=Console(width=200, file=printed))
        found = contents(tmp_path / "run")
        assert found
        assert not [path for path, data in found.items() if SECRET.encode() in data]
        assert load(tmp_path / "run/config.yaml").reward.functions[0].args["field"] == "x"  # pyright: ignore
        saved: Any = load(tmp_path / "run/config.yaml")
        assert saved.reward.functions[0].args["api_key"] == saved.reward.functions[0].args["judges"][0]["hf_token"]
        with pytest.raises(ConfigError, match=re.escape(f"args.api_key = {MASK}")):
            check(saved)
    finally:
        directory.close()
    assert compare_configs(read_config(tmp_path / "run/config.yaml"), config, None) == ([], False)
    with pytest.raises(ConfigError) as refused:
        check(load(DEBUG, judge("field")))
    assert SECRET not in str(refused.value)


def test_names_of_special_tokens_are_no_secrets() -> None:
    secret = ("token", "judge_token", "api-key", "Authorization", "passwd", "tokens", "openaiApiKey", "hfTokens")
    known = ("end_token", "eos_token", "stop_tokens", "tokenizer")
    hidden = without_secrets(dict.fromkeys((*secret, *known), "x"), inside=True)
    assert hidden == dict.fromkeys(secret, MASK) | dict.fromkeys(known, "x")


def test_all_that_is_below_the_name_of_a_secret_is_one() -> None:
    secrets = {"token": ["k1", "k2"], "api_keys": [{"for": "k3"}], "credentials": {"user": "k4"}, "password": 12345678}
    known: dict[str, Any] = {"max_tokens": 64, "token": None, "use_token": True, "nested": [{"field": "x"}]}
    for given, shown in ((secrets, dict.fromkeys(secrets, MASK)), (known, known)):
        assert without_secrets({"functions": [{"args": given}]}) == {"functions": [{"args": shown}]}


def test_a_job_gets_the_secrets_in_a_file_of_its_owner(tmp_path: Path) -> None:
    function = {"name": f"{__name__}:judged", "args": {"apiKeys": [SECRET]}}
    save(load(DEBUG, [*judge()[:1], f"reward.functions=[{json.dumps(function)}]"]), tmp_path / "job.yaml")
    assert SECRET in (tmp_path / "job.yaml").read_text()
    assert (tmp_path / "job.yaml").stat().st_mode & 0o077 == 0
    save(load(DEBUG), tmp_path / "plain.yaml")
    assert (tmp_path / "plain.yaml").stat().st_mode & 0o044
