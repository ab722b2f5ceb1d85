"""Shows the help of `specjax.limits.setting` as the text of an attribute on the page of the API."""

import ast
from typing import Any

import griffe


class SettingHelp(griffe.Extension):
    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **_: Any) -> None:
        call = getattr(node, "value", None)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "setting":
            attr.docstring = griffe.Docstring(ast.literal_eval(call.args[1]), parent=attr)
