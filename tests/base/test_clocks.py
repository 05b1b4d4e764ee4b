"""Ages are measured by a clock that nobody sets; who reads the wall clock is named here, with a reason."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path

import prefixd
import prefixd_scheduler
import prefixd_swap
from prefixd.base.clocks import boot_id, cpu_wait_s, elapsed_s

READS_THE_WALL_CLOCK = {
    "prefixd/cli/output/tables/waterfall.py": "it shows people when a request came",
    "prefixd/integrations/vllm/naming/model_name.py": "files carry it; a clock that is set back is seen by `elapsed_s`",
    "prefixd/integrations/vllm/scheduling/scheduler.py": "vLLM stamps requests with it; bounded by `FRONT_END_S`",
    "prefixd/observability/request_log.py": "people and collectors of spans compare it with other logs",
    "prefixd/planner/machine/calibrate.py": "a seed",
    "prefixd/server/access/audit.py": "people read it, and compare it with other logs",
    "prefixd/server/http/openai/openai_routes.py": "`created`, as OpenAI's answers carry it",
    "prefixd/server/kv_events/publishing/publisher.py": "routers on other hosts get it, as vLLM's events carry it",
    "prefixd/serving/text/chat_template.py": "chat templates write the date into prompts (`strftime_now`)",
    "swap/prefixd_swap/stores/s3/s3_store.py": "hosts share it: signatures, and ages of objects; bounded by `expire_s`",
    "prefixd/workloads/circumstances.py": "the date of a result",
}
WALL = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package, above in ((prefixd, ""), (prefixd_swap, "swap/"), (prefixd_scheduler, "scheduler/")):
        folder = Path(str(package.__file__)).parent
        for path in sorted(folder.rglob("*.py")):
            yield f"{above}{path.relative_to(folder.parent)}", ast.parse(path.read_text())


def reads_wall_clock(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            module = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if node.attr in WALL.get(module, ()):
                return True
        if isinstance(node, ast.ImportFrom) and node.module == "time" and {n.name for n in node.names} & WALL["time"]:
            return True
    return False


def test_nobody_else_reads_the_wall_clock() -> None:
    assert {path for path, tree in sources() if reads_wall_clock(tree)} == set(READS_THE_WALL_CLOCK)


def test_a_read_of_the_wall_clock_is_seen() -> None:
    for line in (
        "import time\nx = time.time",
        "import time\nx = time.time_ns()",
        "from time import time",
        "from datetime import datetime, UTC\nx = datetime.now(UTC)",
        "import datetime\nx = datetime.datetime.now()",
    ):
        assert reads_wall_clock(ast.parse(line)), line
    assert not reads_wall_clock(ast.parse("import time\nx = time.monotonic()"))


def test_the_clock_counts_from_the_boot() -> None:
    assert time.clock_gettime(time.CLOCK_MONOTONIC) <= elapsed_s() <= elapsed_s()
    assert boot_id() == boot_id() and len(boot_id()) == 36


def test_the_time_without_a_cpu_grows_and_is_a_part_of_all() -> None:
    began_s, waited_s = time.monotonic(), cpu_wait_s()
    sum(range(200_000))
    assert 0 <= cpu_wait_s() - waited_s <= time.monotonic() - began_s
