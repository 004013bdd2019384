"""`redraft regenerate` asks a running server, or starts one of the target."""

from __future__ import annotations

import io
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from teachers import Teacher, teaching
from waiting import wait_until

from redraft.engine.server import VllmServer
from redraft.recipes.data import regenerate
from redraft.recipes.data.regenerate import RegenerateConfig, main


class Answering(Teacher):
    def reply(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {
            "choices": [
                {"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
            ]
        }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "really?"}]}) + "\n")
    return path


def read_answers(path: Path) -> list[str]:
    return [json.loads(line)["messages"][-1]["content"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("args", "max_tokens"), [(("--x",), 256), (("--max-model-len", "4096"), 2048)]
)
def test_the_engine_is_started_for_a_target_and_stopped(
    args: tuple[str, ...],
    max_tokens: int,
    source: Path,
    random_target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[dict[str, Any]] = []

    @contextmanager
    def serve(target: str, **options: Any) -> Iterator[VllmServer]:
        with teaching(Answering(model=target)) as teacher:
            started.append(options)
            yield VllmServer(url=teacher.url, model=target, dtype="auto", num_speculative_tokens=0)
            started.append({"max_tokens": {request["max_tokens"] for request in teacher.requests}})

    monkeypatch.setattr(regenerate, "vllm_server", serve)
    output, limit = tmp_path / "answers.jsonl", 512
    main(
        RegenerateConfig(
            prompts=str(source),
            output=output,
            target=str(random_target),
            concurrency=5,
            vllm_args=args,
        )
    )
    assert read_answers(output) == ["yes"]
    assert json.loads(output.read_text())["settings"]["model"] == str(random_target)
    options, stopped = started
    assert (options["max_num_seqs"], options["extra_args"]) == (5, args)
    assert "dtype" not in options, "the type of training"
    assert options["max_model_len"] == limit
    assert stopped == {"max_tokens": {max_tokens}}, "as many as the context has room for"


def test_answers_of_another_target_behind_the_same_name_are_not_continued(
    random_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, output, source = (
        tmp_path / "target",
        tmp_path / "answers.jsonl",
        tmp_path / "questions.jsonl",
    )
    shutil.copytree(random_target, target)
    source.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(4)))
    words = "old"

    class Versioned(Teacher):
        def reply(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            return 200, {
                "choices": [
                    {"message": {"role": "assistant", "content": words}, "finish_reason": "stop"}
                ]
            }

    @contextmanager
    def serve(target: str, **_: Any) -> Iterator[VllmServer]:
        with teaching(Versioned(model=target)) as teacher:
            yield VllmServer(url=teacher.url, model=target, dtype="auto", num_speculative_tokens=0)

    def run(num: int, *args: str, **changes: Any) -> list[str]:
        cfg = RegenerateConfig(
            prompts=str(source),
            output=output,
            target=str(target),
            num_conversations=num,
            vllm_args=args,
        )
        main(replace(cfg, **changes))
        return sorted(read_answers(output))

    monkeypatch.setattr(regenerate, "vllm_server", serve)
    assert run(2) == ["old"] * 2
    assert run(3) == ["old"] * 3, "the same target continues"
    with pytest.raises(ValueError, match="--overwrite"):
        run(4, "--dtype=bfloat16")
    weights = load_file(target / "model.safetensors")
    changes: list[tuple[str, Any]] = [
        ("generation_config.json", lambda path: path.write_text('{"temperature": 0.1}')),
        ("chat_template.jinja", lambda path: path.write_text("{{ messages[0].content }}")),
        (
            "model.safetensors",
            lambda path: save_file(
                {name: 2 * tensor for name, tensor in weights.items()}, path, {"format": "pt"}
            ),
        ),
    ]
    for name, change in changes:
        words = name
        change(target / name)
        before = read_answers(output)
        with pytest.raises(ValueError, match="--overwrite"):
            run(4)
        assert read_answers(output) == before
        assert run(4, overwrite=True) == [name] * 4


def test_a_running_server_is_asked_as_before(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regenerate, "vllm_server", None)
    with teaching(Answering()) as teacher:
        main(
            RegenerateConfig(
                prompts=str(source), output=tmp_path / "answers.jsonl", url=teacher.url
            )
        )
    assert read_answers(tmp_path / "answers.jsonl") == ["yes"]


def test_overwrite_answers_again_and_replaces_only_answers(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    with teaching(Answering()) as teacher:
        for limit in (5, 6):
            main(
                RegenerateConfig(
                    prompts=str(source),
                    output=output,
                    url=teacher.url,
                    max_tokens=limit,
                    overwrite=True,
                )
            )
            assert [json.loads(line)["settings"]["max_tokens"] for line in output.open()] == [limit]
        with pytest.raises(ValueError, match="--overwrite"):
            main(RegenerateConfig(prompts=str(source), output=output, url=teacher.url))
        text = source.read_text()
        other = tmp_path / "other.jsonl"
        other.write_text(text)
        with pytest.raises(ValueError, match="line 1"):
            main(
                RegenerateConfig(prompts=str(source), output=other, url=teacher.url, overwrite=True)
            )
    assert other.read_text() == text
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".answers.jsonl.lock",
        ".other.jsonl.lock",
        "answers.jsonl",
        "other.jsonl",
        "questions.jsonl",
    ]


def test_answers_are_never_their_own_prompts(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    with teaching(Answering()) as teacher:
        main(RegenerateConfig(prompts=str(source), output=output, url=teacher.url))
        text = output.read_text()
        (tmp_path / "link.jsonl").symlink_to(output)
        for prompts in (output, tmp_path / "link.jsonl"):
            for overwrite in (True, False):
                cfg = RegenerateConfig(
                    prompts=str(prompts), output=output, url=teacher.url, overwrite=overwrite
                )
                with pytest.raises(ValueError, match="--prompts") as refused:
                    main(replace(cfg, max_tokens=7))
                assert "--overwrite" not in str(refused.value)
    assert output.read_text() == text


def test_old_answers_stay_until_the_server_has_answered(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, rows = tmp_path / "answers.jsonl", [{"prompt": f"question {i}"} for i in range(3)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    @dataclass
    class Failing(Teacher):
        num_answers: int = 0

        def reply(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            if len(self.requests) > self.num_answers:
                return 401, {"error": {"message": "the key has expired"}}
            message = {"role": "assistant", "content": "new"}
            return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}

    with teaching(Answering()) as teacher:
        cfg = RegenerateConfig(
            prompts=str(source), output=output, url=teacher.url, overwrite=True, concurrency=1
        )
        main(cfg)
    with teaching(Failing()) as teacher, pytest.raises(ValueError, match="expired"):
        main(replace(cfg, url=teacher.url))
    with pytest.raises(FileNotFoundError):
        main(replace(cfg, url=None, target=str(tmp_path / "no-such")))
    assert read_answers(output) == ["yes"] * 3
    with teaching(Failing(num_answers=2)) as teacher, pytest.raises(ValueError, match="expired"):
        main(replace(cfg, url=teacher.url))
    kept = tmp_path / ".answers.jsonl.previous" / "answers.jsonl"
    assert str(kept.parent) in capsys.readouterr().out
    assert (read_answers(output), read_answers(kept)) == (["new"] * 2, ["yes"] * 3)
    with teaching(Answering()) as teacher:
        main(replace(cfg, url=teacher.url, overwrite=False))
    assert read_answers(output) == ["new", "new", "yes"]
    assert not kept.parent.exists()


def test_a_second_command_with_the_same_output_waits_for_the_first(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # capfd.readouterr loses what a thread writes between its read and its truncation.
    monkeypatch.setattr(sys, "stdout", said := io.StringIO())
    asked, go_on = threading.Event(), threading.Event()

    class Waiting(Answering):
        def reply(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            asked.set()
            assert go_on.wait(60)
            return super().reply(request)

    def run() -> None:
        main(RegenerateConfig(prompts=str(source), output=output, url=teacher.url))

    output = tmp_path / "answers.jsonl"
    with teaching(Waiting()) as teacher, ThreadPoolExecutor(2) as pool:
        first = pool.submit(run)
        assert asked.wait(60)
        second = pool.submit(run)
        wait_until(lambda: "waiting for another" in said.getvalue())
        assert not second.done()
        go_on.set()
        first.result(60)
        second.result(60)
    assert (len(teacher.requests), read_answers(output)) == (1, ["yes"])


@pytest.mark.parametrize("name", ["answers.jsonl.gz", "answers.parquet", "answers"])
def test_answers_have_the_name_of_their_format(source: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"\.jsonl"):
        main(
            RegenerateConfig(prompts=str(source), output=tmp_path / name, url="http://127.0.0.1:1")
        )


def test_a_target_and_a_url_are_one_too_many(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--target\b.*--url"):
        main(
            RegenerateConfig(
                prompts=str(source),
                output=tmp_path / "x.jsonl",
                target="t",
                url="http://127.0.0.1:1",
            )
        )


@pytest.mark.slow
@pytest.mark.vllm
def test_a_real_engine_answers(
    source: Path, served_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, output = str(served_pair[0]), tmp_path / "answers.jsonl"
    main(
        RegenerateConfig(
            prompts=str(source),
            output=output,
            target=target,
            temperature=0.0,
            max_tokens=8,
            concurrency=2,
        )
    )
    assert len(read_answers(output)) == 1
    settings = json.loads(output.read_text())["settings"]
    assert (settings["temperature"], settings["max_tokens"]) == (0.0, 8)
    assert output.with_suffix(".vllm.log").is_file()
