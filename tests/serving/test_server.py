"""The process around the application: addresses, ``quantforge serve``, signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import quantforge.serving
from quantforge.cli.app import run
from quantforge.cli.serve import model_name
from quantforge.console import Console
from quantforge.errors import UsageError
from quantforge.runtime.engine import Engine
from quantforge.serving.server import bind, is_loopback, url_of


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_this_machine_alone_reaches_a_loopback_address(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com"])
def test_other_machines_reach_any_other_address(host: str) -> None:
    assert not is_loopback(host)


def test_a_port_in_use_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1 port {port}: Address already in use"):
            bind("127.0.0.1", port)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(UsageError, match=r"host '999\.1\.1\.1'"):
        bind("999.1.1.1", 0)


def test_an_ipv6_address_stands_in_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with bind("::1", 0) as bound:
        assert url_of(bound) == f"http://[::1]:{bound.getsockname()[1]}"


def test_serving_other_machines_needs_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "no-such-model", "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "--host 0.0.0.0 lets other machines in" in capsys.readouterr().err


def test_a_missing_model_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "./no-such-model", "--port", "0"]) == 5
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_extra_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "quantforge.serving.server")
    monkeypatch.delattr(quantforge.serving, "server")
    assert run(["serve", "model"]) == 2
    assert 'pip install "quantforge[serve]"' in capsys.readouterr().err


def test_a_model_is_served_under_its_own_name(tmp_path: Path) -> None:
    assert model_name(str(tmp_path)) == tmp_path.name
    assert model_name("models/SmolLM2.Q4_1.gguf") == "SmolLM2.Q4_1"
    assert model_name("org/name-1.5B") == "org/name-1.5B"


def test_the_version_is_open(url: str) -> None:
    assert httpx.get(f"{url}/version").json() == {"version": quantforge.__version__}


def test_the_parameters_are_in_the_open_api_document(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json").json()
    completion = document["components"]["schemas"]["CompletionBody"]
    assert completion["additionalProperties"] is False
    assert completion["properties"]["top_p"]["maximum"] == 1
    assert set(completion["required"]) == {"model", "prompt"}


def test_a_broken_engine_ends_serve_with_its_traceback(
    own_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_engine.broken = True
    monkeypatch.setattr(Engine, "from_folder", lambda *_, **__: own_engine)
    asked: list[threading.Thread] = []

    def ask(console: Console, document: dict[str, str], text: str) -> None:
        body = {"model": document["model"], "prompt": "x"}
        address = f"{document['url']}/v1/completions"
        asked.append(threading.Thread(target=httpx.post, args=(address,), kwargs={"json": body}))
        asked[0].start()

    monkeypatch.setattr(Console, "result", ask)
    with pytest.raises(ValueError, match="a defect of the engine"):
        run(["serve", str(tmp_path), "--port", "0"])
    asked[0].join()


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``spawn(*arguments)`` runs Python in a process that does not outlive the test."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "QUANTFORGE_API_KEY": "k"},
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def assert_ends_well(process: subprocess.Popen[str], number: signal.Signals) -> None:
    process.send_signal(number)
    rest, errors = process.communicate(timeout=10)
    assert process.returncode == 0
    assert rest == ""
    assert errors == ""


def test_serve_says_where_it_is_answers_and_ends_well(
    spawn: Callable[..., subprocess.Popen[str]], tiny_model: Callable[..., Path]
) -> None:
    words = ("serve", str(tiny_model()), "--port", "0", "--served-model-name", "m")
    process = spawn("-m", "quantforge", *words, "--json", "--quiet")
    assert process.stdout is not None
    ready = ""
    while not ready.rstrip().endswith("}"):
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        ready += line
    document = json.loads(ready)
    assert document["model"] == "m"
    assert document["kv_cache"] == "float32"
    response = httpx.post(
        f"{document['url']}/v1/completions",
        json={"model": "m", "prompt": "The river", "max_tokens": 4, "ignore_eos": True},
        headers={"authorization": "Bearer k"},
        timeout=20,
    )
    assert response.json()["usage"]["completion_tokens"] == 4, response.text
    assert_ends_well(process, signal.SIGTERM)


def test_an_interrupt_ends_the_server_well(spawn: Callable[..., subprocess.Popen[str]]) -> None:
    program = (
        "from fastapi import FastAPI\n"
        "from quantforge.serving.server import Server, bind\n"
        "Server(FastAPI(), lambda: print('ready', flush=True)).serve_on(bind('127.0.0.1', 0))\n"
    )
    process = spawn("-c", program)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert_ends_well(process, signal.SIGINT)
