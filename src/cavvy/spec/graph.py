"""Several tasks that are submitted together. In `after`, the tasks name each other or jobs that
exist already.
"""

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import Struct

MOST_TASKS = 100


class GraphFault(Struct, frozen=True, kw_only=True):
    """Why tasks cannot be submitted together. `task` is the number of the task with the fault, and
    `key` the key to change.
    """

    task: int
    key: str
    message: str
    hint: str = ""


def find_fault(tasks: Sequence[TaskSpec]) -> GraphFault | None:
    """Return why the tasks cannot be submitted together, or None if they can."""
    if len(tasks) > MOST_TASKS:
        message, hint = f"{len(tasks)} tasks are too many", f"submit at most {MOST_TASKS}"
        return GraphFault(task=MOST_TASKS, key="name", message=message, hint=hint)
    names = [task.name for task in tasks]
    for number, task in enumerate(tasks):
        if task.name in names[:number]:
            message, hint = f"two tasks have the name {task.name}", "give each its own `name`"
            return GraphFault(task=number, key="name", message=message, hint=hint)
        if task.project != tasks[0].project:
            message, hint = "the tasks belong to different projects", "write a file for each"
            return GraphFault(task=number, key="project", message=message, hint=hint)
    try:
        sort_tasks(tasks)
    except CycleError as error:
        first, *rest = reversed(error.args[1])  # each waits for the next
        path = ", which waits for ".join(rest)
        message = f"the tasks wait for each other: {first} waits for {path}"
        hint = "delete one of these conditions"
        number = names.index(first)
        return GraphFault(task=number, key="after", message=message, hint=hint)
    return None


def sort_tasks(tasks: Sequence[TaskSpec]) -> Sequence[int]:
    """Return the numbers of the tasks, each after those that it waits for. Raises CycleError."""
    numbers = {task.name: number for number, task in enumerate(tasks)}
    sorter = TopologicalSorter[str]()
    for task in tasks:
        sorter.add(task.name, *(each.job for each in task.after if each.job in numbers))
    return [numbers[name] for name in sorter.static_order()]
