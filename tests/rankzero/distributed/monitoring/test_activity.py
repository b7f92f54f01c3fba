from rankzero.distributed.monitoring.activity import DATA, FORWARD, Activity


def test_all_listeners_are_called_and_each_can_remove_itself():
    activity, first, second = Activity(), [], []

    def listen_once(phase):
        first.append(phase)
        activity.stop_listening(listen_once)

    activity.listen(listen_once)
    activity.listen(second.append)
    activity.listen(second.append)
    activity.begin_batch(0)
    activity.enter(FORWARD)
    assert first == [DATA] and second == [DATA, FORWARD]
    activity.stop_listening(second.append)
    activity.stop_listening(second.append)
    activity.enter(DATA)
    assert second == [DATA, FORWARD] and not activity.listeners
