"""Who is there: every process calls rank zero, and rank zero answers when all have called. Imports no torch.

This goes before torch's own meeting (a TCPStore on the same socket), which waits without a word and cannot say who is
missing. The protocol is a line each way: rank zero greets, a process tells who it is, rank zero answers with the list
of all, or with the reason why the run cannot start.
"""

import contextlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from project.environments import network
from project.environments.launch import Launch
from project.errors import RequestError

GREETING = "RANKZERO/1"
NO_ANSWER_SECONDS = 6.0
"""So long a host may stay silent: one that is up refuses a connection at once where nobody listens yet."""
TURN_AWAY_SECONDS = 1.0
PROGRESS_SECONDS = 10.0
_POLL_SECONDS = 0.1
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Member:
    """One process, as it tells the others.

    Args:
        rank: Its rank; None where the launcher gives none.
        local_rank: Its rank on its machine; None where the launcher does not say.
        node_rank: Its machine's; None where the launcher does not say.
        world_size: How many processes it believes there are.
        host: Its machine's name.
        pid: Its process id.
        order: What ranks are handed out by, where the launcher gives none.
    """

    rank: int | None
    local_rank: int | None
    node_rank: int | None
    world_size: int
    host: str
    pid: int
    order: int = 0

    @classmethod
    def this(cls, launch: Launch) -> "Member":
        """This process."""
        host, pid = socket.gethostname(), os.getpid()
        return cls(launch.rank, launch.local_rank, launch.node_rank, launch.world_size, host, pid, launch.order)


@dataclass
class Meeting:
    """All are here, or torchrun has seen to it.

    Args:
        launch: Where this process stands; complete where the roll was called.
        members: All processes, by rank; this one alone where the roll was not called.
        ip: The address at which rank zero answered.
        listening: The socket that rank zero was called at; None for the others.
    """

    launch: Launch
    members: list[Member]
    ip: str
    listening: socket.socket | None = None

    @classmethod
    def without_roll_call(cls, launch: Launch) -> "Meeting":
        """For a process that is alone, or that torchrun has brought together with the others."""
        return cls(launch, [Member.this(launch)], launch.address)


def call_roll(launch: Launch, start_timeout: float, interface: str | None = None) -> Meeting:
    """Waits until all processes of the world are here. All ranks must call.

    Args:
        launch: Where this process stands; not torchrun's, which has met already.
        start_timeout: Seconds to wait for all.
        interface: `--interface`, whose address alone is listened on.

    Raises:
        RequestError: Somebody is missing, came twice or belongs to another world, or rank zero cannot be reached.
    """
    me, deadline = Member.this(launch), time.monotonic() + start_timeout
    if interface:
        network.address_of(interface)
    if launch.rank == 0 or (launch.rank is None and launch.node_rank == 0):
        listening = _listen(launch, interface)
        if listening:
            members = _Hall(launch, me, listening, deadline, start_timeout).wait()
            ip = str(listening.getsockname()[0])
            return Meeting(*completed(launch, me, members), "127.0.0.1" if ip == "0.0.0.0" else ip, listening)
    try:
        members, ip = _call(launch, me, deadline, start_timeout)
    except RequestError as error:
        if error.told is None:
            error.own = True
        raise
    return Meeting(*completed(launch, me, members), ip)


def completed(launch: Launch, me: Member, members: Sequence[Member]) -> tuple[Launch, list[Member]]:
    """The launch with what the launcher did not say, and all members with it, by rank."""
    if me.rank is None:
        ordered = sorted(members, key=lambda member: (member.node_rank or 0, member.order, member.pid))
    else:
        ordered = sorted(members, key=lambda member: member.rank or 0)
    told = all(member.node_rank is not None for member in ordered)
    names = [member.node_rank if told else member.host for member in ordered]
    nodes = list(dict.fromkeys(sorted(names) if told else names))  # type: ignore[type-var]
    count = [0] * len(nodes)
    whole = []
    for rank, (member, name) in enumerate(zip(ordered, names, strict=True)):
        node = nodes.index(name)
        local_rank = count[node] if member.local_rank is None else member.local_rank
        whole.append(replace(member, rank=rank, local_rank=local_rank, node_rank=node))
        count[node] += 1
    mine = next(member for old, member in zip(ordered, whole, strict=True) if old == me)
    assert mine.node_rank is not None
    launch = replace(
        launch,
        rank=mine.rank,
        local_rank=mine.local_rank,
        node_rank=mine.node_rank,
        num_nodes=len(nodes),
        local_world_size=count[mine.node_rank],
        processes_a_node=tuple(count),
        hosts=tuple(next(member.host for member in whole if member.node_rank == node) for node in range(len(nodes))),
    )
    return launch, whole


class _Hall:
    """Rank zero's side: takes calls until all are here."""

    def __init__(self, launch: Launch, me: Member, listening: socket.socket, deadline: float, timeout: float) -> None:
        self.launch, self.listening, self.deadline, self.timeout = launch, listening, deadline, timeout
        self.me = me
        self.admitted: dict[socket.socket, Member] = {}
        self.callers: dict[socket.socket, bytes] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(listening, selectors.EVENT_READ)
        listening.setblocking(False)

    @property
    def members(self) -> list[Member]:
        """Those who are here."""
        return [self.me, *self.admitted.values()]

    def wait(self, refusal: RequestError | None = None) -> list[Member]:
        """Waits for all, and answers them; returns all.

        Args:
            refusal: What to answer instead, to those who have come by the deadline.

        Raises:
            RequestError: On every process, the same.
        """
        progress = _Progress(self.timeout)
        try:
            while len(self.members) < self.launch.world_size:
                if time.monotonic() > self.deadline:
                    raise refusal or missing(self.launch, self.members, self.timeout)
                progress.tell(lambda: f"{_missing_ranks(self.launch, self.members)}; {len(self.members)} are here")
                for key, _ in self.selector.select(_POLL_SECONDS):
                    self._serve(key.fileobj)  # type: ignore[arg-type]
        except RequestError as error:
            self._answer({"refused": [error.asked, error.found, error.instead]})
            raise
        members = self.members
        self._answer({"members": [asdict(member) for member in members]})
        return members

    def _serve(self, ready: socket.socket) -> None:
        if ready is self.listening:
            try:
                caller, _ = self.listening.accept()
                caller.settimeout(2)
                caller.sendall(f"{GREETING} {json.dumps(self.launch.key)}\n".encode())
            except OSError:
                return
            self.callers[caller] = b""
            self.selector.register(caller, selectors.EVENT_READ)
            return
        try:
            received = ready.recv(1 << 16)
        except OSError:
            received = b""
        self.callers[ready] += received
        if not received or len(self.callers[ready]) > _LONGEST_LINE:
            self._drop(ready)
        elif ready not in self.admitted and (member := _read_member(self.callers[ready])):
            self._admit(ready, member)

    def _admit(self, caller: socket.socket, member: Member) -> None:
        self.admitted[caller] = member
        if member.world_size != self.launch.world_size:
            raise RequestError(
                f"a world of {self.launch.world_size} (rank 0 on {self.me.host})",
                f"rank {member.rank} on {member.host} was told of {member.world_size}",
                "the same line, with the same --nodes and --devices or WORLD_SIZE, on every machine",
            )
        for other in self.members:
            if other is not member and other.rank is not None and other.rank == member.rank:
                raise RequestError(
                    f"one process of rank {member.rank}",
                    f"two: process {other.pid} on {other.host} and process {member.pid} on {member.host}",
                    "another --node_rank (or RANK) on each",
                )

    def _drop(self, caller: socket.socket) -> None:
        self.selector.unregister(caller)
        del self.callers[caller]
        self.admitted.pop(caller, None)
        caller.close()

    def _answer(self, answer: object) -> None:
        """Answers all callers, and is done with them; the listening socket stays."""
        line = (json.dumps(answer) + "\n").encode()
        for caller in list(self.callers):
            with contextlib.suppress(OSError):  # it has left; whoever started it tells
                caller.sendall(line)
            self._drop(caller)
        self.selector.close()
        if isinstance(answer, dict) and "refused" in answer:
            self.listening.close()


def _listen(launch: Launch, interface: str | None) -> socket.socket | None:
    """Rank zero's socket; None where somebody of this world listens already, so that one can call instead.

    Raises:
        RequestError: The address is not this machine's.
    """
    if launch.listening is not None:
        return socket.socket(fileno=launch.listening)
    ips = network.resolve(launch.address)
    own = [ip for ip in ips if network.is_mine(ip)]
    try:
        listening = network.listen(_where_to_listen(launch, own, interface), launch.port)
    except OSError:
        return None
    if not own and not _reaches_itself(ips, launch.port, listening):
        listening.close()
        raise _not_rank_zeros(launch, ips)
    return listening


def _not_rank_zeros(launch: Launch, ips: Sequence[str]) -> RequestError:
    host, place = socket.gethostname(), f"{launch.address} ({', '.join(ips)})"
    found = f"rank 0 is on {host}, and {place} is another machine or none"
    if launch.rank != 0:
        found = f"{place} is {host}, and rank 0 is not on it: this is rank {launch.rank}"
    by_hand = f"--node_rank 0 on {launch.address}" if launch.launcher == "local" else ""
    return RequestError(
        f"to meet at {launch.address}:{launch.port}, rank 0's machine",
        found,
        "\nor ".join(filter(None, (by_hand, _how_to_say(launch, host if launch.rank == 0 else "HOST")))),
    )


def _is_at_the_wrong_machine(launch: Launch, ips: Sequence[str]) -> bool:
    """Whether all were sent to this machine, where rank zero cannot come."""
    return bool(launch.node_rank) and any(network.is_mine(ip) and not network.is_loopback(ip) for ip in ips)


def _turn_away(launch: Launch, ips: Sequence[str], error: RequestError) -> None:
    """Tells those who come to this machine that rank zero is not here, for a moment."""
    with contextlib.suppress(OSError), network.listen(ips[0], launch.port) as listening:
        hall = _Hall(launch, Member.this(launch), listening, time.monotonic() + TURN_AWAY_SECONDS, TURN_AWAY_SECONDS)
        with contextlib.suppress(RequestError):
            hall.wait(refusal=error)


def _where_to_listen(launch: Launch, own: Sequence[str], interface: str | None) -> str:
    """The address to listen on; all of them (`""`) where the one that the others use cannot be known."""
    interface = interface or network.interface_by_variable()
    if interface:
        return network.address_of(interface)
    beyond = [ip for ip in own if not network.is_loopback(ip)]
    if own and not beyond and (launch.one_machine or launch.address in ("localhost", *own)):
        return own[0]
    # A name that means loopback here (127.0.1.1 on Debian) means something else on the other machines.
    return beyond[0] if len(beyond) == 1 == len(own) else ""


def _reaches_itself(ips: Sequence[str], port: int, listening: socket.socket) -> bool:
    """Whether a connection to a foreign address comes back to this socket, as in a container with a published port."""
    for ip in ips:
        try:
            with socket.create_connection((ip, port), timeout=3) as sent:
                listening.settimeout(1)
                received, _ = listening.accept()
                with received:
                    received.sendall(b"rankzero")
                    sent.settimeout(1)
                    if sent.recv(8) == b"rankzero":
                        return True
        except OSError:
            continue
    return False


def _how_to_say(launch: Launch, host: str) -> str:
    """How a person gives rank zero's address under a launcher."""
    by_variable = {"mpi": f"mpirun -x MASTER_ADDR={host} ... (Open MPI), -genv MASTER_ADDR {host} (hydra),\nor "}
    return by_variable.get(launch.launcher, "") + f"--master_addr {host}"


def _call(launch: Launch, me: Member, deadline: float, timeout: float) -> tuple[list[Member], str]:
    """Calls rank zero until it is there, and waits for its answer; returns all, and where it answered."""
    ips, began = network.resolve(launch.address), time.monotonic()
    progress, silent_since = _Progress(timeout), None
    while True:
        refused = False
        for ip in ips:
            try:
                connection = socket.create_connection((ip, launch.port), timeout=2)
            except ConnectionRefusedError:
                refused = True
                continue
            except OSError:
                continue
            with connection:
                members = _converse(connection, launch, me, deadline)
            if members is not None:
                return members, ip
            refused = True
        now = time.monotonic()
        silent_since = None if refused else (silent_since or began)
        if launch.rank == 0 or (silent_since is not None and now - silent_since > NO_ANSWER_SECONDS):
            raise _nobody_answers(launch, ips)
        if now - began > NO_ANSWER_SECONDS and _is_at_the_wrong_machine(launch, ips):
            error = _not_rank_zeros(launch, ips)
            _turn_away(launch, ips, error)
            raise error
        if now > deadline:
            error = missing(launch, [me], timeout)
            error.told = me.local_rank not in (0, None)  # rank zero, who would tell, is not there
            raise error
        if me.local_rank == 0:
            progress.tell(lambda: f"rank 0 at {launch.address}:{launch.port}")
        time.sleep(_POLL_SECONDS)


def _converse(connection: socket.socket, launch: Launch, me: Member, deadline: float) -> list[Member] | None:
    """Tells rank zero who we are, and waits for its answer; None where it hung up, so that one can call again.

    Raises:
        RequestError: It is not rank zero of this world that listens there, or it says that the run cannot start.
    """
    try:
        with connection.makefile("rwb") as line:
            # Of one machine's own processes the port is known to be rank zero's, however late it comes.
            patience = deadline - time.monotonic() if launch.launcher == "local" and launch.one_machine else 5
            connection.settimeout(max(patience, 0.1))
            greeting = line.readline(4096).decode(errors="replace").strip()
            if greeting != f"{GREETING} {json.dumps(launch.key)}":
                if not greeting and launch.rank != 0:
                    return None
                raise _foreign(launch, greeting)
            line.write((json.dumps(asdict(me)) + "\n").encode())
            line.flush()
            connection.settimeout(max(deadline - time.monotonic(), 0) + 5)
            text = line.readline(_LONGEST_LINE * 64)
    except TimeoutError:
        raise _foreign(launch, "") from None
    except OSError:
        return None
    if not text:
        return None
    answer = json.loads(text)
    if "refused" in answer:
        refusal = RequestError(*answer["refused"])
        refusal.told = True
        raise refusal
    return [Member(**member) for member in answer["members"]]


def _read_member(received: bytes) -> Member | None:
    """A member from its line; None where the line is not whole, or is somebody else's."""
    line, newline, _ = received.partition(b"\n")
    try:
        return Member(**json.loads(line)) if newline else None
    except (ValueError, TypeError):
        return None


def missing(launch: Launch, members: Sequence[Member], timeout: float) -> RequestError:
    """The error that names the ranks and machines that have not come."""
    came = sorted({member.host for member in members})
    nodes = {member.node_rank for member in members}
    absent = [host for host in launch.hosts if host not in came] if len(set(launch.hosts)) > 1 else []
    if not absent and launch.num_nodes and None not in nodes:
        absent = [f"node {node}" for node in range(launch.num_nodes) if node not in nodes]
    elif launch.hosts and len(launch.hosts) == launch.num_nodes and None not in nodes:
        absent = [host for node, host in enumerate(launch.hosts) if node not in nodes]
    return RequestError(
        f"{launch.shape} within {timeout:g} s (--start_timeout)",
        f"{_missing_ranks(launch, members)}"
        + (f"; nobody from {', '.join(absent)}" if absent else "")
        + f"; {len(members)} of {launch.world_size} came, from {', '.join(came)}",
        "the same line on every machine; is one down, or is the port "
        f"{launch.address}:{launch.port} closed to it? --start_timeout {max(int(timeout), 1) * 4} waits longer",
    )


def _missing_ranks(launch: Launch, members: Sequence[Member]) -> str:
    if launch.rank is None:
        return f"missing {launch.world_size - len(members)} of {launch.world_size} tasks"
    ranks = sorted(set(range(launch.world_size)) - {member.rank for member in members})
    if len(members) == 1 and launch.rank != 0:
        return f"missing rank 0, which the others meet at {launch.address}:{launch.port}"
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"missing rank{'s' * (len(ranks) > 1)} {shown}"


def _nobody_answers(launch: Launch, ips: Sequence[str]) -> RequestError:
    if launch.rank == 0:
        return RequestError(
            f"to listen on port {launch.port} of {socket.gethostname()}",
            f"it is in use by {network.holder(launch.port)}",
            "--master_port PORT (or MASTER_PORT=PORT), another one, the same for all",
        )
    return RequestError(
        f"to meet at {launch.address}:{launch.port} (MASTER_ADDR, --master_addr or the launcher's first host)",
        f"{launch.address} ({', '.join(ips)}) does not answer {socket.gethostname()}",
        "--master_addr HOST, where HOST is the name or IP address of rank 0's machine",
    )


def _foreign(launch: Launch, greeting: str) -> RequestError:
    if greeting.startswith(GREETING):
        who = f"another run's rank 0 ({greeting.removeprefix(GREETING).strip()})"
    else:
        who = "something that is no run about to start"
        if any(network.is_mine(ip) for ip in network.resolve(launch.address)):
            who = f"in use by {network.holder(launch.port)}"
    return RequestError(
        f"to meet at {launch.address}:{launch.port}",
        f"that port is {who}" if who.startswith("in use") else f"on that port is {who}",
        "--master_port PORT (or MASTER_PORT=PORT), another one, the same for all",
    )


class _Progress:
    """Says now and then what is being waited for."""

    def __init__(self, timeout: float) -> None:
        self.began = self.told = time.monotonic()
        self.timeout = timeout

    def tell(self, what: object) -> None:
        """Prints a line where it has been silent for a while; `what` is called for the text."""
        now = time.monotonic()
        if now - self.told > PROGRESS_SECONDS:
            self.told = now
            left = self.began + self.timeout - now
            print(f"rankzero: waiting: {what()}; leaving in {left:.0f} s", file=sys.stderr, flush=True)  # type: ignore[operator]
