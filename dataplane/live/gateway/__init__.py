"""The gateway process: vLLM's OpenAI front end over FleetCore, admission, placement and metrics."""
