# SPDX-License-Identifier: Apache-2.0
"""OpenAI's protocol: what is asked of a text or embedding model under `/v1`. Bytes to samples and back; no I/O.

Bodies are JSON objects that name the model. Only what the server itself must know of one is read here, on the loop; the
worker reads the rest. A request is one sample or several: a chat is one for each of `n` choices, a completion one for
each prompt and choice, embeddings are one for each text,
ranks and scores one for each pair of texts.

| module | what |
|---|---|
| `doors` | where models are asked that say so, and in which form |
| `request_reading` | from a body to what is asked and the bodies of its samples |
| `texts` | from the parts of each choice to one answer, whole or as events, with stops, limits and usage |
| `answer_blocks` | the same as blocks, for the two forms below |
| `responses`, `anthropic_messages` | bodies of other forms as those of chats, and answers in them |
| `audio` | what the server reads of the form with a recording, and transcripts, as subtitles as well |
| `logprobs` | how likely tokens were, told with the text that is handed on |
| `joined_results` | from the vectors or scores of each text to one answer |
| `openapi_paths` | the paths below `/v1` in the OpenAPI document |
| `openai_errors` | statuses and bodies of errors: `{"error": {"message", "type", "param", "code"}}` |

Answers are `chat.completion`, `text_completion` and `list` objects; streams are server-sent events of
`chat.completion.chunk` and `text_completion` objects, the last of which is `[DONE]`. An error in the middle of a stream
is an event with the body of the error, and ends it.
"""
