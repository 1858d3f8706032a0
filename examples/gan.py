"""Two models that train against each other, each with its own optimizer: a GAN of points on a ring.

The generator's loss reads the critic's parameters, and the critic's those of the generator. No gradient moves what is
not one's own: that is a model's state. So each model is given the other's parameters as its state before its step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmdkit
from spmdkit import LossSums, Model

NOISE, WIDTH, ROWS = 8, 64, 256


def layers(key, *sizes):
    """Matrices of a small network; their last row is what is added."""
    keys = jax.random.split(key, len(sizes) - 1)
    shapes = zip(keys, sizes, sizes[1:], strict=False)
    return {f"layer{n}": jax.random.normal(key, (a + 1, b)) / a**0.5 for n, (key, a, b) in enumerate(shapes)}


def apply(params, x):
    """The network."""
    for number, name in enumerate(sorted(params)):
        x = jax.nn.leaky_relu(x) if number else x
        x = jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1) @ params[name]
    return x


def made(generator, batch):
    """Points that the generator makes of a batch's noise."""
    return apply(generator, batch["noise"])


def generator_loss(generator, batch, key, critic):
    """The critic should take made points for real ones."""
    losses = jax.nn.softplus(-apply(critic, made(generator, batch))[:, 0])
    return LossSums(losses.sum(), losses.size, {}, critic)


def critic_loss(critic, batch, key, generator):
    """Real points are real, made ones are not."""
    real, fake = apply(critic, batch["points"])[:, 0], apply(critic, made(generator, batch))[:, 0]
    losses = jax.nn.softplus(-real) + jax.nn.softplus(fake)
    told_apart = ((real > 0).sum() + (fake < 0).sum()) / 2
    return LossSums(losses.sum(), losses.size, {"told_apart": (told_apart, losses.size)}, generator)


def generator_init(key):
    """The generator's parameters."""
    return layers(key, NOISE, WIDTH, WIDTH, 2)


def critic_init(key):
    """The critic's parameters."""
    return layers(jax.random.fold_in(key, 1), 2, WIDTH, WIDTH, 1)


def batch_of(random):
    """Points on a ring, and noise to make others of."""
    angle = random.uniform(0, 2 * np.pi, ROWS)
    points = np.stack([np.cos(angle), np.sin(angle)], axis=1) + 0.05 * random.normal(size=(ROWS, 2))
    return {"points": points.astype("float32"), "noise": random.normal(size=(ROWS, NOISE)).astype("float32")}


def main(steps=300):
    """Trains both, in turn, over 8 devices; returns how far made points are from the ring."""
    strategy = {"data": 8}
    generator = Model(init=generator_init, init_state=critic_init, loss=generator_loss, name="generator")
    critic = Model(init=critic_init, init_state=generator_init, loss=critic_loss, name="critic")
    make = spmdkit.build_step(generator, optax.adam(1e-3, b1=0.5), spmdkit.lay_out(generator, strategy))
    judge = spmdkit.build_step(critic, optax.adam(2e-3, b1=0.5), spmdkit.lay_out(critic, strategy))
    makes, judges, random = make.init(0), judge.init(0), np.random.default_rng(0)
    for number in range(1, steps + 1):
        batch = batch_of(random)
        judges = judges._replace(model_state=jax.tree.map(jnp.copy, makes.params))  # a step consumes what it is given
        judges, judged = judge(judges, batch)
        makes = makes._replace(model_state=jax.tree.map(jnp.copy, judges.params))
        makes, _ = make(makes, batch)
        jax.block_until_ready(makes.step)  # simulated devices share a few threads: no more steps at once than these two
        if number % 100 == 0:
            print(f"step {number}: told apart {float(judged.model['told_apart']):.2f}")
    points = jax.device_get(made(makes.params, batch_of(random)))
    away = float(np.abs(np.linalg.norm(points, axis=1) - 1).mean())
    print(f"made points are {away:.2f} from the ring")
    return away


if __name__ == "__main__":
    spmdkit.DeviceMesh.simulated(8, data=8)
    main()
