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
    if fault := _find_group_fault(tasks):
        return fault
    try:
        sort_tasks(tasks)
    except CycleError as error:
        first, *rest = reversed(error.args[1])  # each waits for the next
        path = ", which waits for ".join(rest)
        message = f"the tasks wait for each other: {first} waits for {path}"
        hint = "delete one of these conditions"
        number = [*map(_unit_of, tasks)].index(first)
        return GraphFault(task=number, key="after", message=message, hint=hint)
    return None


def _find_group_fault(tasks: Sequence[TaskSpec]) -> GraphFault | None:
    """Return why the groups of the tasks could not start, or None if they could."""
    groups = {task.name: task.group.name for task in tasks if task.group is not None}
    for number, task in enumerate(tasks):
        if task.group is None:
            continue
        name = task.group.name
        if any(name == each.name for each in tasks):
            message = f"{name} is the name of a group and of a task"
            hint = "choose another name for the group"
            return GraphFault(task=number, key="group", message=message, hint=hint)
        for each in task.after:
            if groups.get(each.job) == name or each.job == name:
                message = f"{task.name} waits for {each.job}, but starts together with it"
                hint = "delete this condition, or `group`"
                return GraphFault(task=number, key="after", message=message, hint=hint)
        if all(one.group.helper for one in tasks if one.group and one.group.name == name):
            message = f"all tasks of the group {name} are helpers, so that it would never end"
            hint = "delete `helper` from the task that the others serve"
            return GraphFault(task=number, key="group", message=message, hint=hint)
    return None


def sort_tasks(tasks: Sequence[TaskSpec]) -> Sequence[int]:
    """Return the numbers of the tasks, each after those that it waits for. Raises CycleError."""
    units = {task.name: _unit_of(task) for task in tasks}
    sorter = TopologicalSorter[str]()
    for task in tasks:
        before = (units[each.job] for each in task.after if each.job in units)
        sorter.add(units[task.name], *before)
    places = {unit: place for place, unit in enumerate(sorter.static_order())}
    return sorted(range(len(tasks)), key=lambda number: places[_unit_of(tasks[number])])


def _unit_of(task: TaskSpec) -> str:
    """Return the name of what starts as a whole: the task, or its group."""
    return task.name if task.group is None else task.group.name
