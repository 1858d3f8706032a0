"""The commands: names, arguments and help texts, by topic. Each one imports what it needs when it runs."""
