"""Market bars: rewards by hand, no look-ahead, files good and bad, and something to learn."""

import datetime
import sys

import numpy as np
import pytest
import torch

from sharpwave import envs
from sharpwave.algos.ppo import PPO, PPOConfig
from sharpwave.envs import bars as module
from sharpwave.envs._bar_files import Instrument, generate_instruments
from sharpwave.envs.bars import Bars
from sharpwave.run.evaluate import evaluate

SHORT, FLAT, LONG = 0, 1, 2
NO_GAPS = np.empty(0, dtype=np.int64)


@pytest.fixture
def market(monkeypatch):
    """Makes environments over the bars given."""

    def make(*series, num_envs=1, gaps=(), **options):
        found = [Instrument(f"i{i}", np.asarray(s, dtype=float), np.array(gaps, int)) for i, s in enumerate(series)]
        monkeypatch.setattr(module, "generate_instruments", lambda *_: found)
        return Bars(num_envs, **options)

    return make


def flat_bar(price, volume=0.0):
    return [price, price, price, price, volume]


class TestByHand:
    BARS = (
        flat_bar(100.0),
        [100, 110, 100, 110, 3],
        [121, 121, 99, 99, 0],  # opens 10 % above 110
        [99, 99, 99, 99, 0],
        [99, 198, 99, 198, 0],
    )

    def test_observation(self, market):
        """Window of 2 at bar 2: 100 log of prices over the close before; volumes 0 -> 3 -> 0 are log 4 and -log 4."""
        env = market(self.BARS, window=2, episode_length=2, cost=0.0)
        log = np.log
        first = [0, log(110 / 100), 0, log(110 / 100), log(4) / 100]
        second = [log(121 / 110), log(121 / 110), log(99 / 110), log(99 / 110), -log(4) / 100]
        want = 100 * np.array([*first, *second, 0])
        np.testing.assert_allclose(env.reset(0).obs[0].numpy(), want, rtol=1e-6)

    def test_rewards(self, market):
        """At bar 1 long is taken at the open of 121, closes at 99; then short from bar 3's open on; then flat again."""
        env = market(self.BARS, window=1, episode_length=3, cost=0.01)
        env.reset(0)
        got = [env.step(torch.tensor([a])) for a in (LONG, SHORT, FLAT)]
        want = [99 / 121 - 1 - 0.01, 0.0 - 0.02, 0.0 - 0.01]
        np.testing.assert_allclose([s.reward.item() for s in got], want, atol=1e-6)
        assert [s.next_obs[0, -1].item() for s in got] == [1.0, -1.0, 0.0], "the position is seen"
        assert [s.truncated.item() for s in got] == [False, False, True] and not any(s.terminated for s in got)
        assert got[2].obs[0, -1] == 0

    def test_the_old_position_is_held_until_the_open(self, market):
        """Short over a rise of 10 % from close to open, and closed there; the rest of the bar is nothing to it."""
        rising = [flat_bar(100.0), flat_bar(100.0), flat_bar(100.0), [110, 220, 110, 220, 0]]
        env = market(rising, window=1, episode_length=2, cost=0.0)
        env.reset(0)
        env.step(torch.tensor([SHORT]))
        assert env.step(torch.tensor([FLAT])).reward.item() == pytest.approx(-0.1)
        env.reset(0)
        env.step(torch.tensor([SHORT]))
        assert env.step(torch.tensor([LONG])).reward.item() == pytest.approx(-0.1 + 1.0)

    def test_against_a_loop(self):
        """Random actions over generated bars, in float64, each environment found by the bars it sees."""
        env = Bars(5, window=3, episode_length=20, instruments=2, length=60, cost=0.002)
        series = generate_instruments(2, 60, 0, 0.3, 0.01)
        closes = {(i, t): s.bars[t, 3] / s.bars[t - 1, 3] for i, s in enumerate(series) for t in range(1, 60)}

        def place(row):  # the newest bar's close feature tells where it is
            return min(closes, key=lambda k: abs(100 * np.log(closes[k]) - row[2 * 5 + 3]))

        obs = env.reset(0).obs.numpy()
        where, held, age = [place(row) for row in obs], [0.0] * 5, 0
        for action in torch.randint(0, 3, (45, 5), generator=torch.Generator().manual_seed(1)):
            step = env.step(action)
            age += 1
            for n in range(5):
                (i, t), new = where[n], float(action[n]) - 1
                b = series[i].bars
                want = held[n] * (b[t + 1, 0] / b[t, 3] - 1) + new * (b[t + 1, 3] / b[t + 1, 0] - 1)
                assert step.reward[n].item() == pytest.approx(want - 0.002 * abs(new - held[n]), abs=1e-6)
                assert place(step.next_obs[n].numpy()) == (i, t + 1)
                where[n], held[n] = (i, t + 1), new
            assert step.truncated.all() == step.truncated.any() == (age == 20)
            if age == 20:
                where, held, age = [place(row) for row in step.obs.numpy()], [0.0] * 5, 0


class TestNoLookAhead:
    @pytest.mark.parametrize("seed", range(6))
    def test_later_bars_change_nothing(self, market, seed):
        """Every bar after a random t replaced: all that was seen and earned up to t is equal bit for bit."""
        rng = np.random.default_rng(seed)
        series = generate_instruments(1, 80, seed, 0.2, 0.02)[0].bars
        options = dict(window=int(rng.integers(1, 9)), episode_length=int(rng.integers(5, 40)), num_envs=16)
        t = int(rng.integers(20, 70))
        other = series.copy()
        other[t + 1 :] *= np.exp(rng.normal(size=(79 - t, 1)))
        other[t + 1 :, 4] = rng.exponential(size=79 - t)
        actions = torch.from_numpy(rng.integers(0, 3, (100, 16)))

        def trace(bars):
            env = market(bars, **options)
            rows = [(env._bar.clone(), env.reset(seed).obs, torch.zeros(16), env._bar.clone())]
            for action in actions:
                before = env._bar + 1
                step = env.step(action)
                rows.append((before, step.next_obs, step.reward, env._bar.clone()))
                rows.append((env._bar.clone(), step.obs, torch.zeros(16), env._bar.clone()))
            return [torch.stack(x) for x in zip(*rows[1:], strict=True)]

        at, seen, earned, _ = trace(series)
        also_at, also_seen, also_earned, _ = trace(other)
        assert torch.equal(at, also_at)
        upto = at <= t
        assert upto.any() and (~upto).any()
        assert torch.equal(seen[upto], also_seen[upto]) and torch.equal(earned[upto], also_earned[upto])
        assert not torch.equal(seen[~upto], also_seen[~upto]) and not torch.equal(earned[~upto], also_earned[~upto])


class TestEpisodes:
    def test_starts_leave_room_for_a_whole_episode(self, market):
        env = market([flat_bar(1.0 + t) for t in range(12)], window=2, episode_length=5, num_envs=4000)
        env.reset(0)
        assert env._bar.unique().tolist() == [2, 3, 4, 5, 6] and (env._end - env._bar == 5).all()

    def test_no_episode_crosses_a_gap_or_the_split(self, market):
        bars = [flat_bar(1.0 + t) for t in range(20)]
        env = market(bars, window=1, episode_length=3, num_envs=4000, gaps=[8], split=(0.0, 0.8))
        env.reset(0)
        assert env._bar.max() == 12, "gaps are ignored unless they are to be cut at"
        monkeypatched = market(bars, window=1, episode_length=3, num_envs=4000, split=(0.0, 0.8))
        assert len(monkeypatched._starts) == 12
        found = [Instrument("i", np.asarray(bars, float), np.array([8]))]
        module.generate_instruments = lambda *_: found  # restored by the fixture
        env = Bars(4000, window=1, episode_length=3, split=(0.0, 0.8), gaps="split")
        env.reset(0)
        assert env._bar.unique().tolist() == [1, 2, 3, 4, 9, 10, 11, 12]
        assert ((env._bar < 8) == (env._end < 8)).all()

    def test_a_backtest_plays_each_instrument_from_the_first_bar(self, market):
        one, two = [flat_bar(1.0 + t) for t in range(6)], [flat_bar(2.0 + t) for t in range(9)]
        env = market(one, two, num_envs=3, window=2, episode_length=None, start="first")
        env.reset(0)
        assert env._bar.tolist() == [2, 8, 2] and env._end.tolist() == [5, 14, 5]
        ends = [env.step(torch.full((3,), LONG)).truncated.tolist() for _ in range(6)]
        assert ends == [[False] * 3, [False] * 3, [True, False, True], [False] * 3, [False] * 3, [True] * 3]

    def test_too_few_bars(self, market):
        with pytest.raises(ValueError, match=r"= 8 bars in a row; the longest instrument, 'i0', has 5"):
            market([flat_bar(1.0)] * 5, window=2, episode_length=5)

    def test_a_state_of_other_bars_is_refused(self):
        a, b = (Bars(2, data_seed=seed, instruments=1, length=300) for seed in (0, 1))
        a.reset(0)
        with pytest.raises(ValueError, match="other bars"):
            b.load_state_dict(a.state_dict())

    def test_options(self):
        for options, word in [
            ({"window": 0}, "window"),
            ({"cost": -0.1}, "cost"),
            ({"split": (0.5, 0.5)}, "split"),
            ({"start": "last"}, "start"),
            ({"gaps": "fill"}, "gaps"),
            ({"momentum": 1.0}, "momentum"),
        ]:
            with pytest.raises(ValueError, match=word):
                envs.make("sharpwave/Bars", 1, **options)


def test_generated_returns_are_what_they_should_be():
    """Correlation 0.3 and deviation 0.01 within 5 standard errors of 100000 bars; every bar is a bar."""
    (series,) = generate_instruments(1, 100_000, 3, 0.3, 0.01)
    r = np.diff(np.log(series.bars[:, 3]))
    assert np.corrcoef(r[1:], r[:-1])[0, 1] == pytest.approx(0.3, abs=5 / np.sqrt(1e5))
    assert r.std() == pytest.approx(0.01, rel=0.02)
    prices = series.bars[:, :4]
    assert (prices[:, 1] == prices.max(1)).all() and (prices[:, 2] == prices.min(1)).all() and (prices > 0).all()
    np.testing.assert_allclose(prices[1:, 0], prices[:-1, 3])


@pytest.fixture
def write(tmp_path):
    """Writes bars as a CSV or Parquet file: columns by name, with single entries replaced."""
    pl = pytest.importorskip("polars")

    def make(name="bars.csv", rows=8, drop=(), times=None, **replaced):
        start = datetime.datetime(2024, 1, 1)
        columns = {
            "time": times or [start + datetime.timedelta(hours=i) for i in range(rows)],
            "open": [1.0 + i for i in range(rows)],
            "high": [2.5 + i for i in range(rows)],
            "low": [0.5 + i for i in range(rows)],
            "close": [2.0 + i for i in range(rows)],
            "volume": [10.0] * rows,
        }
        for column, changes in replaced.items():
            values = list(columns.get(column, [None] * rows))
            for row, value in changes.items():
                values[row] = value
            columns[column] = values
        frame = pl.DataFrame({k: v for k, v in columns.items() if k not in drop}, strict=False)
        path = tmp_path / name
        frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_csv(path)
        return str(path)

    return make


def make_bars(path, **options):
    return envs.make("sharpwave/Bars", 2, **({"window": 2, "episode_length": 3, "path": path} | options))


class TestFiles:
    @pytest.mark.parametrize("name", ["bars.csv", "bars.parquet"])
    def test_read(self, write, name):
        env = make_bars(write(name))
        (found,) = env.instruments
        assert found.name == "bars" and found.bars.shape == (8, 5) and found.bars[3].tolist() == [4, 5.5, 3.5, 5, 10]
        obs = env.reset(0).obs
        assert torch.isfinite(obs).all() and torch.isfinite(env.step(torch.tensor([0, 2])).reward).all()

    def test_several_instruments_and_files(self, write, tmp_path):
        write("a.csv", symbol=dict.fromkeys(range(8), "A") | {i: "B" for i in (1, 3, 5, 7)})
        write("c.csv")
        env = make_bars(str(tmp_path / "*.csv"), window=1, episode_length=1)
        assert [(i.name, len(i.bars)) for i in env.instruments] == [("A", 4), ("B", 4), ("c", 8)]
        assert env.instruments[1].bars[:, 0].tolist() == [2, 4, 6, 8]
        with pytest.raises(ValueError, match="instrument 'c' is in more than one"):
            make_bars([str(tmp_path / "c.csv")] * 2)

    @pytest.mark.parametrize("times", [list(range(8)), [f"2024-01-0{d}" for d in range(1, 9)]], ids=["int", "date"])
    @pytest.mark.parametrize("name", ["bars.csv", "bars.parquet"])
    def test_kinds_of_time(self, write, name, times):
        assert len(make_bars(write(name, times=times)).instruments[0].bars) == 8

    @pytest.mark.parametrize("name", ["bars.csv", "bars.parquet"])
    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"high": {4: None}}, "row 5, column 'high': is empty"),
            ({"close": {2: float("nan")}}, "row 3, column 'close': must be a finite number; got '?[nN]a[nN]"),
            ({"volume": {0: float("inf")}}, "row 1, column 'volume': must be a finite number; got '?inf"),
            ({"open": {7: 0.0}}, "row 8, column 'open': must be above 0; the bar is open 0, high 9.5"),
            ({"low": {1: 3.3}}, "row 2, column 'low': must be the lowest price of its bar"),
            ({"high": {1: 2.2}}, "row 2, column 'high': must be the highest price of its bar"),
            ({"volume": {6: -1.0}}, "row 7, column 'volume': must be at least 0"),
            ({"time": {3: None}}, "row 4, column 'time': is empty"),
            (
                {"time": {3: datetime.datetime(2024, 1, 1, 2)}},
                r"row 4, column 'time': 2024-01-01T02:00:00 is there twice \(row 3 has 2024-01-01T02:00:00\)",
            ),
            (
                {"time": {3: datetime.datetime(2023, 1, 1)}},
                r"row 4, column 'time': 2023-01-01T00:00:00 is before the last bar \(row 3 has",
            ),
            (
                {"time": {7: datetime.datetime(2024, 1, 1, 9)}},
                "row 8, column 'time': a gap: 2024-01-01T09:00:00 follows 2024-01-01T06:00:00, 3 times the usual step",
            ),
        ],
    )
    def test_what_is_wrong_is_named(self, write, name, changes, message):
        with pytest.raises(ValueError, match=f"{name}, {message}"):
            make_bars(write(name, **changes))

    def test_text_where_numbers_belong(self, write):
        with pytest.raises(ValueError, match="row 2, column 'high': must be a finite number; got 'n/a'"):
            make_bars(write(high={1: "n/a"}))
        with pytest.raises(ValueError, match=r"row 2, column 'time': must be a date such as .*; got 'soon'"):
            make_bars(write(times=["2024-01-01", "soon", *[f"2024-01-0{i}" for i in range(3, 9)]]))
        with pytest.raises(ValueError, match="row 1, column 'time': must be a date"):
            make_bars(write(times=["soon"] * 8))

    def test_gaps_may_be_cut_at_or_ignored(self, write):
        path = write(time={7: datetime.datetime(2024, 1, 3)})
        assert len(make_bars(path, gaps="ignore")._starts) == 3
        assert len(make_bars(path, gaps="split")._starts) == 2

    def test_columns_and_files(self, write, tmp_path):
        with pytest.raises(ValueError, match=r"bars\.csv: column 'high', 'time' is missing; there are"):
            make_bars(write(drop=("high", "time")))
        with pytest.raises(ValueError, match="there is no such file"):
            make_bars(str(tmp_path / "none.csv"))
        (tmp_path / "bars.xls").write_text("")
        with pytest.raises(ValueError, match=r"bars are read from \.csv"):
            make_bars(str(tmp_path / "bars.xls"))
        (tmp_path / "torn.parquet").write_text("PAR1")
        with pytest.raises(ValueError, match=r"torn\.parquet cannot be read"):
            make_bars(str(tmp_path / "torn.parquet"))

    def test_without_polars(self, write, monkeypatch):
        path = write()
        monkeypatch.setitem(sys.modules, "polars", None)
        with pytest.raises(ImportError, match=r"pip install 'sharpwave\[bars\]'"):
            make_bars(path)
        assert Bars(2).num_envs == 2, "generated bars need nothing"


def test_momentum_is_learnt():
    """Following the last return earns 0.3 * 0.01 * sqrt(2 / pi) a bar before costs: 0.08 in 32 bars. Chance earns 0."""
    options = dict(window=1, episode_length=32, cost=1e-5)
    config = PPOConfig(
        env="sharpwave/Bars",
        device="cpu",
        env_kwargs=options,
        total_steps=32_768,
        horizon=32,
        minibatch=512,
        hidden=32,
        layers=0,
        gamma=0.0,
        normalize_reward=True,
    )
    agent = PPO(config)
    while agent.epoch < agent.num_epochs:
        agent.train_epoch()
    unseen = Bars(256, data_seed=1, **options)
    assert evaluate(agent, unseen, 1024, seed=1).mean() > 0.05
