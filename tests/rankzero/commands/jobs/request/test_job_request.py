import re
from dataclasses import MISSING, fields

from rankzero.commands.jobs.request.job_request import FORMS, QUEUING, JobRequest, array_indices
from rankzero.commands.jobs.request.options import LISTS, SUBMIT_FLAGS
from rankzero.commands.jobs.script import TEMPLATES

FIELDS = {field.name: field for field in fields(JobRequest)}
STATED = {flag.name: match[1] for flag in SUBMIT_FLAGS if (match := re.search(r"\[([^]]*)\]$", flag.help))}
"""Flag -> the default that its help states in brackets."""


def test_the_fields_of_a_request_are_the_flags_of_submit_and_are_described_in_the_docstring():
    assert sorted(FIELDS) == sorted([*(flag.name for flag in SUBMIT_FLAGS), "arguments"])
    assert re.findall(r"^ {8}(\w+): \S", JobRequest.__doc__, re.MULTILINE) == list(FIELDS)


def test_the_help_states_the_default_of_each_field():
    forms = "; ".join(f"{scheduler}: {forms[0]}" for scheduler, forms in FORMS.items() if forms)
    for name, stated in STATED.items():
        default = forms if name == "form" else FIELDS[name].default
        assert stated in ("the scheduler's default", "that of submit") if default is None else stated == str(default)


def test_flags_whose_help_states_no_default_are_required_or_unset():
    unset = {name: field.default for name, field in FIELDS.items() if name not in STATED and name != "arguments"}
    required = [name for name, default in unset.items() if default is MISSING]
    assert required == ["scheduler", "name"]
    assert all(unset[name] == () for name in LISTS)
    assert all(default is None for name, default in unset.items() if name not in (*LISTS, *required))


def test_each_form_has_a_template_and_each_template_belongs_to_a_form():
    forms = {f"{scheduler}/{form}" for scheduler, forms in FORMS.items() for form in forms}
    forms |= {scheduler for scheduler, forms in FORMS.items() if not forms} - {"docker", "apptainer"}  # local or ssh
    templates = [path.relative_to(TEMPLATES).as_posix().removesuffix(".sh.j2") for path in TEMPLATES.rglob("*.sh.j2")]
    assert sorted(templates) == sorted(forms)
    assert set(QUEUING) <= set(FORMS)


def test_an_array_is_expanded_to_its_indices():
    expected = {"3": [3], "0-3": [0, 1, 2, 3], "1,5-9:2%2": [1, 5, 7, 9], "0-5:2": [0, 2, 4]}
    assert {array: array_indices(array) for array in expected} == expected
