"""Text <-> token ids, chat templates, incremental detokenization. Start with `zse.tokenizer.load.load_tokenizer`."""
