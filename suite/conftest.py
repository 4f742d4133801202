pytest_plugins = ["jagbench.suite.plugin"]
