"""An HTTP server of one model, in the forms that clients of OpenAI's and Anthropic's interfaces speak.

`python -m maxmoe.server` starts it; `app.make_app` is what it serves. One thread owns the engine (`engine_thread`);
everything else is one asyncio loop that never waits for it.
"""
