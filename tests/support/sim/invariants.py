"""What must hold in a cluster with replicas, at every moment and in the end.

The checkers of history.py judge what workers have seen; this file looks into the servers and the scheduler.
"""

from memberships import copied_state
from shoal.cluster.protocol.messages import AcceptedReply

COMPARE_SECONDS = 0.2


def map_copies(map):
    """Return on how many other servers each arc has copies in sync."""
    servers = [set() for _ in map.arcs]
    for stream in map.streams:
        if map.endpoint(stream.backup).server != map.endpoint(stream.primary).server:
            for arc in stream.arcs:
                servers[arc].add(map.endpoint(stream.backup).server)
    return [len(one) for one in servers]


class Monitor:
    """Collects violations while a cluster runs.

    Attributes
    ----------
    violations : list of str
    compared : int
        Copies of arcs that were compared with their primaries.
    """

    def __init__(self, world):
        self.world = world
        self.violations = []
        self.compared = 0
        self.executed = {}  # stream -> last record that its backup has executed
        self.receivers = {}  # stream -> the backup that has received something since
        self.maps = {}  # epoch -> the map that has it
        self.state = None  # of the scheduler that died
        self.generations = {}  # server -> the greatest of its scheduler's
        world.network.after(COMPARE_SECONDS, self._compare_at_times)

    def report(self, text):
        if text not in self.violations:
            self.violations.append(text)

    # --- commits ---

    def received(self, address, peer):
        """A backup has received something over a stream."""
        self.receivers[int(peer.decode().split("~")[1].split(">")[0])] = address

    def _observe_all(self, addresses):
        """Note what these backups have executed, before their copies may change."""
        for stream in [stream for stream, address in self.receivers.items() if address in addresses]:
            self._observe(self.receivers.pop(stream), stream)

    def _observe(self, address, stream):
        for replica in self.world.services[address].replication()["replicas"]:
            if replica["stream"] == stream:
                self.executed[stream] = replica["position"]
                if replica["fault"]:
                    self.report(f"the replica of stream {stream} has diverged: {replica['fault']}")

    def acknowledged(self, end):
        """A primary has received an acknowledgement."""
        if end.stream in self.receivers:
            self._observe(self.receivers.pop(end.stream), end.stream)
        for stream in self.world.services[end.address].replication()["streams"]:
            if stream["stream"] == end.stream and stream["acknowledged"] > self.executed.get(end.stream, 0):
                self.report(
                    f"{end.address} counts {stream['acknowledged']} records of stream {end.stream} as acknowledged, "
                    f"{end.to} has executed {self.executed.get(end.stream, 0)}"
                )

    # --- maps ---

    def assigned(self, server):
        """A server has received a map: nobody else serves its arcs whom the scheduler has not declared dead."""
        map = server.control.map
        known = self.maps.setdefault(map.epoch, map)
        if known is not map and known != map:
            self.report(f"there are two maps of epoch {map.epoch}")
        if not self._is_known(server):
            return  # it was declared dead, and can commit nothing
        mine = {endpoint.id for endpoint in server.control.endpoints}
        arcs = {number for number, arc in enumerate(map.arcs) if arc.primary in mine}
        for other in self.world.living():
            if other is server or other.fault is not None or not self._is_known(other):
                continue
            its = {endpoint.id for endpoint in other.control.endpoints}
            both = [
                number for number, arc in enumerate(other.control.map.arcs) if arc.primary in its and number in arcs
            ]
            if both:
                self.report(f"{server.addresses[0]} and {other.addresses[0]} both serve the arcs {both}")

    def _is_known(self, server):
        return server.sender in self.world.membership._peers.known

    # --- the scheduler ---

    def ordered(self, server, message):
        """A server executes an order or an assignment."""
        self._observe_all(server.addresses)
        newest = self.generations.get(server, 0)
        if message.generation < newest:
            self.report(f"{server.addresses[0]} obeys generation {message.generation}, which {newest} has replaced")
        self.generations[server] = max(newest, message.generation)

    def scheduler_died(self, lost):
        """The scheduler dies; it has not stored the last inputs, ``lost`` of them."""
        self.state = None if lost else self._state()

    def scheduler_restarted(self):
        """Another one has replayed its inputs."""
        state = self._state()
        if self.state is not None and state != self.state:
            self.report("the scheduler that was started again has another state")

    def _state(self):
        return copied_state(self.world.membership)

    # --- copies ---

    def _compare_at_times(self):
        self.compare()
        if not self.world.over:
            self.world.network.after(COMPARE_SECONDS, self._compare_at_times)

    def compare(self):
        """Compare each copy that has executed all records of its primary with it, bit by bit."""
        for server in self.world.living():
            for address in server.addresses:
                service = self.world.services[address]
                targets = {id: to for id, to, _ in service.targets()}
                for stream in service.replication()["streams"]:
                    backup = self.world.services[targets[stream["stream"]]]
                    for replica in backup.replication()["replicas"]:
                        is_same = replica["stream"] == stream["stream"]
                        if is_same and replica["position"] == stream["acknowledged"] and not stream["bytes"]:
                            self._compare(service, backup, stream, replica)

    def _compare(self, service, backup, stream, replica):
        if self.world.saves is not None and self.world.saves.are_saving(service, backup):
            return  # it cannot be read, or it was primary, and its thread has not noticed the end of the save
        copy = backup.replica(stream["stream"])
        for first, end in stream["in_sync"]:
            if (first, end) in replica["in_sync"]:
                self.compared += 1
                if service.save_arc(first, end) != copy.save_arc(first, end):
                    self.report(f"slots {first} to {end - 1} of stream {stream['stream']} differ from their copy")

    # --- the end ---

    def restless(self):
        """Return what is still under way, "" if nothing is."""
        world = self.world
        membership = world.membership
        if world.is_down or world.network.now < world.stalled_until:
            return "the scheduler is down"
        if membership.broken:
            return ""
        if world.cuts:
            return "a connection is cut"
        if world.uncommitted:
            return "the scheduler's journal is not written"
        if not membership.at_rest:
            return "the scheduler is not at rest"
        if membership.state.draining:
            return f"the servers {sorted(membership.state.draining)} are not empty"
        if membership._replicas.plan_at is not None:
            return "a plan is due"
        if any(tool.reply is None for tool in world.tools):
            return "a request of a tool has no reply"
        map = membership.map
        for stream in () if map is None else map.streams:
            if stream.arriving:
                return f"arc {stream.arriving[0]} is arriving over stream {stream.id}"
        members = world.members()
        for server in members:
            if not server.alive or server.stopped_until > world.network.now:
                return f"{server.addresses[0]} has died or is stopped"
            if server.control is None:
                return f"{server.addresses[0]} has not received its map"
            if server.control.has_pending:
                return f"{server.addresses[0]} has not confirmed all"
            for address in server.addresses:
                service = world.services[address]
                state = service.replication()
                if state["held"] or not service.committed(state["position"]):
                    return f"{address} holds {state['held']} replies"
        for server in world.living():
            if server not in members:
                return f"{server.addresses[0]} does not end"
        return ""

    def ended(self):
        """The cluster is at rest: all copies are there, and equal."""
        world = self.world
        if world.membership.broken:
            self.report(f"the cluster is broken: {world.membership.broken}")
            return
        if world.restless:
            self.report(f"the cluster does not come to rest: {world.restless}")
            return
        map = world.membership.map
        wanted = min(world.replicas, len(world.members()) - 1)
        copies = [0] * len(map.arcs)
        before = self.compared
        for stream in map.streams:
            for arc in stream.arcs:
                copies[arc] += 1
            for arc in stream.arriving:
                self.report(f"arc {arc} is still arriving over stream {stream.id}")
        if min(map_copies(map)) < wanted:
            self.report(f"arcs have copies on {map_copies(map)} other servers, not {wanted}")
        self.compare()
        if self.compared - before != sum(copies):
            self.report(f"{self.compared - before} copies were compared, not {sum(copies)}")
        tables = sorted([*world.tables, *(table.id for table in world.membership.state.tables.values())])
        for endpoint in map.owners:
            there = world.services[endpoint.address].tables()
            if there != tables:
                self.report(f"{endpoint.address} has the tables {there}, not {tables}")
        for tool in world.tools:
            if not isinstance(tool.reply, AcceptedReply):
                self.report(f"{type(tool.body).__name__} was refused: {tool.reply}")
