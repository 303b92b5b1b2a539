"""`python -m jagg_fx demo`: GRPO post-training of a small flow DiT, exact beside jagg_fx, measured as it runs."""
