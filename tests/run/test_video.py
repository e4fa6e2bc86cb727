"""Films: their pictures, their format, and what cannot be filmed."""

import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from sharpwave import envs
from sharpwave.cli import main
from sharpwave.envs import Discrete, Observation, Reset, Step, TensorEnv
from sharpwave.run import config as configs
from sharpwave.run import video
from sharpwave.run.errors import UserError

av = pytest.importorskip("av")
Image = pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def workplace(monkeypatch, tmp_path):
    monkeypatch.setitem(configs.ALGORITHMS, "stub", ("tests.run.stub:StubConfig", "tests.run.stub:Stub"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


class Idle:
    """Always takes action 0, and notes where episodes begin."""

    def __init__(self):
        self.begins = []

    def act(self, obs, state, reset, *, deterministic=False, mask=None):
        self.begins.append(bool(reset))
        return torch.zeros(1, dtype=torch.int64), None


class Counting(gymnasium.Env):
    """Four steps an episode; the picture's brightness is the step, 10 each."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None, size=(33, 21)):
        self.render_mode, self.size = render_mode, size

    def reset(self, *, seed=None, options=None):
        self.step_count = 0
        return np.zeros(2, dtype=np.float32), {}

    def step(self, action):
        self.step_count += 1
        return np.zeros(2, dtype=np.float32), 1.5, self.step_count == 4, False, {}

    def render(self):
        return np.full((*self.size, 3), 10 * self.step_count, dtype=np.uint8)


class Sightless(Counting):
    """Takes no render_mode."""

    def __init__(self):
        super().__init__()


def frames(path):
    if path.suffix == ".gif":
        image = Image.open(path)
        shots = []
        for i in range(image.n_frames):
            image.seek(i)
            shots.append(np.asarray(image.convert("RGB")))
        return shots
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_every_picture_of_every_episode_is_there(suffix):
    agent, path = Idle(), Path(f"x{suffix}")
    film = video.record(agent, f"{__name__}:Counting", {}, "cpu", path, episodes=2)
    assert film.returns == [6.0, 6.0] and not film.is_cut
    # Two episodes of the first picture and four steps, the last picture of each among them.
    assert film.frames == 10 and film.seconds == 0.5
    assert agent.begins == [True, False, False, False] * 2
    got = frames(path)
    brightness = [round(shot.mean() / 10) for shot in got]
    assert brightness == [0, 1, 2, 3, 4] * 2
    assert got[0].shape == ((34, 22, 3) if suffix == ".mp4" else (33, 21, 3))
    assert sorted(p.name for p in Path().iterdir()) == [path.name]


def test_the_rate_is_the_environments_or_the_callers():
    for fps, rate in ((None, 20), (7.5, 7.5)):
        video.record(Idle(), f"{__name__}:Counting", {}, "cpu", Path("x.mp4"), fps=fps, force=True)
        with av.open("x.mp4") as container:
            assert float(container.streams.video[0].average_rate) == rate


def test_a_film_that_would_not_end_is_cut(monkeypatch):
    monkeypatch.setattr(video, "LIMIT", 7)
    film = video.record(Idle(), f"{__name__}:Counting", {}, "cpu", Path("x.gif"), episodes=100)
    assert (film.frames, film.is_cut, film.returns) == (7, True, [6.0])
    assert len(frames(Path("x.gif"))) == 7


def test_gymnasium_draws():
    pytest.importorskip("pygame")
    film = video.record(Idle(), "CartPole-v1", {}, "cpu", Path("x.mp4"), seed=3)
    assert film.frames == film.returns[0] + 1
    first = frames(Path("x.mp4"))[0]
    assert first.shape == (400, 600, 3) and first.std() > 10


def test_the_native_cartpole_draws_itself():
    env = envs.make("sharpwave/CartPole", 2)
    env.reset(0)
    env._physics[0] = torch.tensor([1.0, 0.0, 0.2, 0.0])
    shot = env.render()
    pole = np.argwhere((shot == (200, 130, 70)).all(2))
    # 1 m long and leaning by 0.2 to the right: its foot is at x = 1 (column 200), its tip 0.2 further (column 210).
    assert pole[:, 0].max() - pole[:, 0].min() == pytest.approx(50 * np.cos(0.2), abs=2)
    assert pole[pole[:, 0].argmin(), 1] == pytest.approx(200 + 50 * np.sin(0.2), abs=3)
    film = video.record(Idle(), "sharpwave/CartPole", {"max_episode_steps": 5}, "cpu", Path("x.gif"), episodes=2)
    assert film.frames == 10 and film.returns == [5.0, 5.0]


class Board(TensorEnv):
    """Its observation is a picture: one plane for each of two things."""

    def __init__(self, num_envs, device="cpu"):
        super().__init__("Board", num_envs, device, Observation((4, 4, 2), torch.bool), Discrete((2,)))
        self.board = self._keep("board", torch.zeros(num_envs, 4, 4, 2, dtype=torch.bool))

    def _begin(self):
        self.board.zero_()
        self.board[:, 1, 2, 0] = True

    def _observe(self):
        return Reset(self.board.clone())

    def _step(self, action):
        no = torch.zeros(self.num_envs, dtype=torch.bool)
        self.board[:, 3, 0, 1] = True
        return Step(self._observe().obs, no.float(), ~no, no, self._observe().obs)


def test_observations_that_are_pictures_are_filmed():
    film = video.record(Idle(), f"{__name__}:Board", {}, "cpu", Path("x.gif"))
    assert film.frames == 2
    last = frames(Path("x.gif"))[-1]
    assert last.shape == (256, 256, 3)
    cells = last[32::64, 32::64]
    assert (cells[1, 2] == video.PALETTE[0]).all() and (cells[3, 0] == video.PALETTE[1]).all()
    assert (cells.sum(2) > 0).sum() == 2


@pytest.mark.parametrize(
    "shape, dtype, pixel",
    [
        ((84, 84, 3), np.uint8, (7, 8, 9)),
        ((3, 84, 84), np.uint8, (7, 8, 9)),
        ((4, 84, 84), np.uint8, (10, 10, 10)),  # four frames in a row: the last
        ((84, 84), np.uint8, (7, 7, 7)),
        ((84, 84, 1), np.float32, (255, 255, 255)),
    ],
)
def test_pictures_of_observations(shape, dtype, pixel):
    obs = np.zeros(shape, dtype=dtype)
    where = (slice(None), 0, 0) if shape[0] < 5 else (0, 0)
    values = np.arange(7, 11, dtype=dtype)
    obs[where] = values[: np.size(obs[where])] if np.ndim(obs[where]) else 7
    shot = video.picture(obs)
    assert shot.dtype == np.uint8 and shot.shape == (336, 336, 3)
    assert tuple(shot[0, 0]) == pixel and (shot[-1, -1] == 0).all()


@pytest.mark.parametrize(
    "env, words",
    [
        ("sharpwave/CueRecall", "sharpwave/CueRecall cannot be filmed: it has neither Gymnasium's render_mode"),
        (f"{__name__}:Sightless", "cannot be filmed"),
        ("NoSuchEnv-v0", "unknown environment 'NoSuchEnv-v0'"),
    ],
)
def test_what_cannot_be_filmed(env, words):
    with pytest.raises(UserError, match=words.replace("(", "\\(")):
        video.record(Idle(), env, {}, "cpu", Path("x.mp4"))
    assert list(Path().iterdir()) == []


def test_an_environment_that_fails_leaves_no_file(monkeypatch):
    def fail(self):
        raise ValueError("no picture today")

    monkeypatch.setattr(Counting, "render", fail)
    with pytest.raises(UserError, match="no picture today"):
        video.record(Idle(), f"{__name__}:Counting", {}, "cpu", Path("x.mp4"))
    assert list(Path().iterdir()) == []


def test_the_command(capfd):
    train = ["train", "stub", "--env", "sharpwave/CartPole", "--env-kwargs", "max_episode_steps=12"]
    assert main([*train, "--eval-episodes", "0", "--run-dir", "r"]) == 0
    capfd.readouterr()
    assert main(["eval", "r", "--episodes", "2", "--video", "x.gif", "--video-episodes", "2"]) == 0
    first, second = capfd.readouterr().out.splitlines()
    assert first == "mean return 12.0, std 0.0, 2 episodes"
    assert second == "x.gif: 24 pictures, 0.5 s, returns of whole episodes 12.0, 12.0"
    Path("y.gif").write_text("mine")
    for arguments, words in (
        ("--video x.gif", "x.gif exists: choose another --video, or give --force to replace it"),
        ("--video y.gif", "y.gif exists"),
        ("--video x.avi", "--video must end in .mp4 or .gif; got x.avi"),
        ("--video no/x.gif", "there is no folder no"),
        ("--video z.gif --fps 0", "--fps must be above 0 and at most 1000; got 0.0"),
        ("--video z.gif --fps nan", "--fps must be above 0 and at most 1000; got nan"),
        ("--video z.gif --video-episodes 0", "--video-episodes must be at least 1; got 0"),
    ):
        assert main(["eval", "r", "--episodes", "2", *arguments.split()]) == 2
        assert words in capfd.readouterr().err
    assert Path("y.gif").read_text() == "mine" and not Path("z.gif").exists()


@pytest.mark.parametrize("module, name, words", [("av", "x.mp4", "an MP4 needs PyAV"), ("PIL", "x.gif", "a GIF needs")])
def test_without_the_libraries(monkeypatch, module, name, words):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=words + r".*pip install 'sharpwave\[video\]'"):
        video.record(Idle(), "sharpwave/CartPole", {}, "cpu", Path(name))


def test_what_is_missing_is_said_before_anything_is_played(monkeypatch, capfd):
    assert main(["train", "stub", "--env", "CartPole-v1", "--eval-episodes", "0", "--run-dir", "r"]) == 0
    capfd.readouterr()
    monkeypatch.setitem(sys.modules, "pygame", None)
    assert main(["eval", "r", "--episodes", "2", "--video", "x.gif"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and "CartPole-v1 draws with pygame, which is missing: pip install 'sharpwave[video]'" in err
