from octavo.core.cli.main import run

run()
