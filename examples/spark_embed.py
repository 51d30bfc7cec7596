"""Features of a folder of images by Spark: each of its Python workers loads the encoder once.

spark-submit examples/spark_embed.py ENCODER FOLDER OUTPUT, where all workers see the three, and
have nearkin and pyspark[ml] installed. OUTPUT is a folder of Parquet files with the columns path,
label (the name of the image's folder) and vector.
"""

import io
import sys

import numpy as np
import torch
from PIL import Image
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import element_at, split
from pyspark.sql.types import ArrayType, FloatType

import nearkin


def embed(spark: SparkSession, encoder: str, folder: str, batch_size: int = 64) -> DataFrame:
    """Return a row for each image below the folder; Spark computes them when they are written."""

    def load():
        network = nearkin.load(encoder)

        def predict(files: np.ndarray) -> np.ndarray:
            images = [Image.open(io.BytesIO(file)) for file in files]
            with torch.inference_mode():
                return network(network.transform(images)).numpy()

        return predict

    features = predict_batch_udf(load, return_type=ArrayType(FloatType()), batch_size=batch_size)
    files = spark.read.format("binaryFile").options(
        recursiveFileLookup=True, pathGlobFilter="*.{jpg,jpeg,png}"
    )
    return files.load(folder).select(
        "path",
        element_at(split("path", "/"), -2).alias("label"),
        features("content").alias("vector"),
    )


if __name__ == "__main__":
    session = SparkSession.builder.appName("nearkin").getOrCreate()
    embed(session, *sys.argv[1:3]).write.parquet(sys.argv[3])
