from cavvy.console.pages.page import Page, find_project
from cavvy_reminders.wire import list_reminders


def make(client, request, now):
    found = list_reminders(client, find_project(client, request))
    return Page("Reminders", "cavvy_reminders:reminders.html", {"reminders": found})
