"""The templates of the report. They escape every text that they show, unless a template made the text."""

from jinja2 import Environment, PackageLoader, StrictUndefined

_ENVIRONMENT = Environment(
    loader=PackageLoader("grpo_megatron.monitoring.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters["px"] = "{:.1f}".format

page = _ENVIRONMENT.get_template("page.html")
# The macros of parts.html as functions, which return HTML.
parts = _ENVIRONMENT.get_template("parts.html").module
