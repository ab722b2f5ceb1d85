"""Two further interfaces of the server. In reading order:

answer_items  helpers of both: lists of items, messages for chat templates, named events
responses     OpenAI's Responses interface, `/v1/responses`
anthropic     Anthropic's Messages interface, `/v1/messages` and `/v1/messages/count_tokens`

Each module holds the bodies of its requests, their tasks, the answer and the routes. `EXTENSIONS` are for
`specjax.serve.app.create_app`; the rest of the server does not depend on this package.
"""

from specjax.serve.dialects.anthropic import EXTENSION as ANTHROPIC
from specjax.serve.dialects.responses import EXTENSION as RESPONSES

EXTENSIONS = (RESPONSES, ANTHROPIC)
