"""Shows the help of `specjax.limits.setting` as the text of an attribute on the page of the API."""

import ast
from typing import Any

import griffe


class SettingHelp(griffe.Extension):
    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, **_: Any) -> None:
        match getattr(node, "value", None):
            case ast.Call(func=ast.Name("setting"), args=[_, ast.Constant(str(text)), *_]):
                attr.docstring = griffe.Docstring(text, parent=attr)
