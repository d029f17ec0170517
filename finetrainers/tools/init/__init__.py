"""First configuration of a LoRA: questions, data, memory, and the commented TOML file."""
