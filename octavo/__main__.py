from octavo.core.cli.main import main

raise SystemExit(main())
