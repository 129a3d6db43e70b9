"""python -m uniep: what was found, as show_config() says it."""

from uniep.show import show_config

if __name__ == "__main__":
    show_config()
