"""The strategies by which a component is moved: pause, reshard, reboot."""
