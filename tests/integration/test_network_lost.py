"""The network between an assembler and the broker frozen, and cut, for longer than timeouts."""

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from infra.broker import start_broker
from infra.broker.ports import free_port
from schemas.records import EventKind
from tests.assembling import Run, assert_whole, create, wait_for
from tests.broker import JAVA_ALONE
from tests.outage import ENDS_TO_START_AGAIN, Load, ends_of, kept_alive
from tests.tcp_proxy import TcpProxy

LOST_S = 12.0  # over the session's 3 s and the transaction's 6 s
SITUATIONS = [(how, protocol) for how in ("freeze", "cut") for protocol in ("classic", "consumer")]


def behind(run: Run, proxy: TcpProxy) -> Run:
    """The same run, as a process sees it that comes through `proxy`."""
    kafka = run.config.kafka.model_copy(update={"bootstrap_servers": f"127.0.0.1:{proxy.port}"})
    return Run(run.config.model_copy(update={"kafka": kafka}), run.manifest, run.topics)


def loses(servers: str, proxy: TcpProxy, directory: Path, how: str, protocol: str) -> None:
    """`a` loses its network, `b` takes over what `a` had, `a` comes back: once each."""
    run = create(
        servers,
        f"network-{how}-{protocol}-{uuid.uuid4().hex[:8]}",
        directory,
        session_timeout_ms=3000,
        transaction_timeout_ms=6000,
        group_protocol=protocol,
    )
    if protocol == "consumer":
        run.shorten_session()
    with Load(run) as load, ExitStack() as assemblers:
        directory_a, directory_b = directory / "a", directory / "b"
        assemblers.enter_context(kept_alive(behind(run, proxy), directory_a, "a"))
        wait_for("partitions", lambda: run.heartbeat("a").get("partitions", 0) == 2)
        wait_for("groups", lambda: len(run.groups()) > 10)
        assemblers.enter_context(kept_alive(run, directory_b, "b"))
        wait_for("a half each", lambda: run.heartbeat("b").get("partitions", 0) == 1)
        lost_s = time.monotonic()
        getattr(proxy, how)()
        wait_for("takeover", lambda: run.heartbeat("b").get("partitions", 0) == 2)
        before = len(run.groups())
        wait_for("groups of both", lambda: len(run.groups()) > before + 10)
        time.sleep(max(0.0, lost_s + LOST_S - time.monotonic()))
        proxy.heal()
        wait_for("return", lambda: run.heartbeat("b").get("partitions", 0) == 1)
        load.stop()
        wait_for("every record's end", run.is_drained)
    assert_whole(run, run.groups(), load.sent)
    accepted = [event.task_index for event in run.events(EventKind.ACCEPTED)]
    assert sorted(accepted) == list(range(load.tasks))
    for end in [*ends_of(run, directory_a, "a"), *ends_of(run, directory_b, "b")]:
        assert end.startswith(ENDS_TO_START_AGAIN), end


def test_an_assembler_without_its_network_loses_and_doubles_nothing(tmp_path: Path) -> None:
    own = [free_port() for _ in SITUATIONS]
    with ExitStack() as started:
        proxies = [started.enter_context(TcpProxy(port)) for port in own]
        proxied = {port: proxy.port for port, proxy in zip(own, proxies, strict=True)}
        broker = started.enter_context(
            start_broker(tmp_path / "broker", progress=print, ways=JAVA_ALONE, proxied=proxied)
        )
        pool = started.enter_context(ThreadPoolExecutor(len(SITUATIONS)))
        running = []
        for number, (situation, proxy) in enumerate(zip(SITUATIONS, proxies, strict=True)):
            directory = tmp_path / str(number)
            for name in "ab":
                (directory / name).mkdir(parents=True)
            servers = broker.bootstrap_servers
            running.append(pool.submit(loses, servers, proxy, directory, *situation))
        for one in running:
            one.result()
